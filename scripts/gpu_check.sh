#!/usr/bin/env bash
# The GPU path on a machine with one NVIDIA GPU: tests and measurements in turn, those that say most first, and one
# report of all. Exits with 1 if a part failed; the others are run nevertheless.
#
#     bash scripts/gpu_check.sh [WHEELS_DIR] [OUT] [--minutes N] [--part 1|2|3] [OPTIONS OF benchmarks/gpu.py]
#
# Where a GPU is lent for a quarter of an hour, in two commands or three, which take these times at most, all included:
#
#     bash scripts/gpu_check.sh wheels out --minutes 8             # part 1; an H200 took less than 6
#     bash scripts/gpu_check.sh wheels out2 --part 2 --minutes 4
#     bash scripts/gpu_check.sh wheels out3 --part 3 --minutes 4
#
# Without --minutes all parts are run, and each step may take three times as long. For a bare machine: Python 3.12,
# torch 2.11 with CUDA 13, transformers 5.17, no package index. What else is needed comes as wheels in WHEELS_DIR, made
# elsewhere by `bash scripts/gpu_wheels.sh WHEELS_DIR`; they are installed into a folder of their own and nothing of the
# machine is changed. Without WHEELS_DIR (or with "") the environment is taken as it is. Into OUT (default: gpu_check):
# report.md, gpu.json with the same figures, and log.txt with what all parts said, without names of machine and user.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
python="${PYTHON:-python3}"
minutes="" part="" places=() options=()
while (($#)); do
    case "$1" in
        --minutes) minutes="$2" && shift ;;
        --part) part="$2" && shift ;;
        --*) options+=("$1") ;;
        *) if ((${#options[@]})); then options+=("$1"); else places+=("$1"); fi ;;
    esac
    shift
done
wheels="${places[0]:-}" out="${places[1]:-gpu_check}"
mkdir -p "$out" || exit

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export DISABLE_CUDA=1 # hqq without kernels of its own
if [ -n "$wheels" ]; then
    site="$(mktemp -d)"
    trap 'rm -rf "$site"' EXIT
    found=("$wheels"/*.whl)
    # FlashAttention 4, of which one wheel comes in two halves
    if [ -d "${wheels}_flash4_1" ] && [ -d "${wheels}_flash4_2" ]; then
        first=("${wheels}_flash4_1"/*.whl.aa)
        large="$(basename "${first[0]}" .aa)"
        joined="$(mktemp -d)"
        trap 'rm -rf "$site" "$joined"' EXIT
        cat "${first[0]}" "${wheels}_flash4_2/$large.ab" >"$joined/$large"
        found+=("${wheels}_flash4_2"/*.whl "$joined/$large")
    fi
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
        --upgrade --target "$site" "${found[@]}" || exit
    export PYTHONPATH="$PWD:$site:$PYTHONPATH"
fi

case "$part" in
    2) options=(--parts second ${options[@]+"${options[@]}"}) ;;
    3) options=(--parts third ${options[@]+"${options[@]}"}) ;;
    1) options=(--parts first ${options[@]+"${options[@]}"}) ;;
    *) [ -z "$minutes" ] || options=(--parts first ${options[@]+"${options[@]}"}) ;;
esac
# With ten seconds for the start and the last report.
[ -z "$minutes" ] || options+=(--max_seconds "$((minutes * 60 - SECONDS - 10))")
"$python" benchmarks/gpu.py --output "$out/gpu.json" --report "$out/report.md" --log "$out/log.txt" \
    ${options[@]+"${options[@]}"}
