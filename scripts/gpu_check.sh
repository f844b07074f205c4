#!/usr/bin/env bash
# The GPU path on a machine with one NVIDIA GPU: the tests of marker gpu, then benchmarks/gpu.py, under 20 minutes
# together. Both run even if the other fails; exits with 1 if one failed.
#
#     bash scripts/gpu_check.sh [WHEELS_DIR] [OUT]
#
# For a bare machine: Python 3.12, torch 2.11 with CUDA 13, transformers 5.17, no package index. What else is needed
# comes as wheels in WHEELS_DIR, made elsewhere by `bash scripts/gpu_wheels.sh WHEELS_DIR`; they are installed into a
# folder of their own and nothing of the machine is changed. Without WHEELS_DIR (or with "") the environment is taken
# as it is. Into OUT (default: gpu_check): tests.log, tests.xml (with the speeds that tests noted), gpu.log, gpu.json,
# and report.md, which names neither machine nor user and can be sent to the project.
# TEST_SECONDS and BENCHMARK_SECONDS bound the two; what is past its bound is ended. TESTS and PARTS choose some, with
# ";" between two parts:
#
#     TESTS="tests/gpu/test_kernels.py" PARTS="box;speed" bash scripts/gpu_check.sh wheels out
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
wheels="${1:-}"
out="$(mkdir -p "${2:-gpu_check}" && cd "${2:-gpu_check}" && pwd)" || exit
python="${PYTHON:-python3}"
test_seconds="${TEST_SECONDS:-600}"
benchmark_seconds="${BENCHMARK_SECONDS:-535}"
tests="${TESTS:-tests/gpu}"

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export DISABLE_CUDA=1 # hqq without kernels of its own
export HF_HUB_OFFLINE=1
if [ -n "$wheels" ]; then
    site="$(mktemp -d)"
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
        --upgrade --target "$site" "$wheels"/*.whl || exit
    export PYTHONPATH="$PWD:$site"
fi

"$python" - <<'PY' || exit
import sys

import torch

if not torch.cuda.is_available():
    sys.exit("gpu_check: no NVIDIA GPU is visible to torch " + torch.__version__)
print(f"gpu_check: {torch.cuda.get_device_name()}, torch {torch.__version__}")
PY

failed=()
check() {
    local name="$1" seconds="$2" start=$SECONDS
    shift 2
    # With a moment more than the program's own bound, and then nothing is left of it.
    timeout --kill-after=10 "$seconds" "$@" 2>&1 | tee "$out/$name.log"
    [ "${PIPESTATUS[0]}" = 0 ] || failed+=("$name")
    echo "== $name took $((SECONDS - start)) s"
}

# Unquoted on purpose: several files.
# shellcheck disable=SC2086
check tests "$test_seconds" "$python" -m pytest -m gpu $tests -p no:cacheprovider --durations=15 \
    --junitxml="$out/tests.xml"
parts=()
[ -z "${PARTS:-}" ] || IFS=';' read -ra parts <<<"--parts;${PARTS}"
check gpu "$((benchmark_seconds + 15))" "$python" benchmarks/gpu.py --max_seconds "$benchmark_seconds" \
    --output "$out/gpu.json" --report "$out/report.md" ${parts[@]+"${parts[@]}"}

if ((${#failed[@]})); then
    echo "FAILED: ${failed[*]}; see $out"
    exit 1
fi
echo "All passed: tests, benchmark; see $out"
