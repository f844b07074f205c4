#!/usr/bin/env bash
# Makes the environment of stand_in/: torch's CUDA build on a stand-in for the CUDA runtime, without a
# GPU and without NVIDIA's libraries. About 700 MB to download, 2 GB on disk; takes no time when it is up to date.
#
#     bash scripts/phantom.sh [lowest|newest]
#
# lowest, the default: the lowest Python that pyproject.toml allows, or the next that is there, and of every library the
# lowest version. newest: the highest Python, and the newest versions that the index has. Where the stand-in is not
# preloaded and CUDA_VISIBLE_DEVICES is empty, both compute on the CPU, with values: scripts/matrix.sh runs tests there.
# FSDP_QLORA_PHANTOM names the environment (default: .venv-phantom in the repository, .venv-newest for the newest),
# FSDP_QLORA_PHANTOM_TORCH another version of torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/python_span.sh
end="${1:-lowest}"
case "$end" in
    lowest) folder=.venv-phantom ;;
    newest) folder=.venv-newest ;;
    *) echo "phantom: lowest or newest, not $end" >&2 && exit 2 ;;
esac
venv="${FSDP_QLORA_PHANTOM:-$PWD/$folder}"
python="$venv/bin/python"
library="$venv/phantom"

# What needs torch is installed without its needs, as torch is: its own would bring 2.7 GB of nvidia-*. Theirs are here.
needs=("typing-extensions>=4.13" "setuptools>=77,<82" sympy networkx einops termcolor wheel pytest pytest-xdist)
# transformers' lowest version reads images with torchvision, of the release that belongs to torch's.
with_images=torchvision
[ "$end" = lowest ] || with_images=""
with_torch="^(torch|accelerate|bitsandbytes|hqq|peft)[=>]"

fail() {
    echo "phantom: $*" >&2
    exit 1
}

# The Pythons of the span as candidates, from this end of it on.
candidates() {
    python_span | if [ "$end" = lowest ]; then cat; else tac; fi | sed 's/^/python/'
}

# What the program and the extras of its tests need, of pyproject.toml: for the lowest end each in its lower bound.
requirements() {
    "$base" - "$end" <<'PYTHON'
import re, sys, tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
names = re.findall(r"\w+", re.search(r"\[(.*)\]", extras["dev"][0])[1])
for need in dict.fromkeys([*project["dependencies"], *(need for name in names for need in extras[name])]):
    print(re.sub(r">=([^,]+).*", r"==\1", need) if sys.argv[1] == "lowest" else need)
PYTHON
}

pip_install() {
    # Its warning about the nvidia-* packages that torch lacks is what we want.
    "$python" -m pip install --quiet --disable-pip-version-check --no-input --upgrade "$@" 2>"$venv/pip.log" || {
        cat "$venv/pip.log" >&2
        return 1
    }
}

install_packages() {
    local torch="torch===${FSDP_QLORA_PHANTOM_TORCH:-}"  # "===" leaves out builds with a suffix, such as +cpu
    [ -n "${FSDP_QLORA_PHANTOM_TORCH:-}" ] || torch="$(grep '^torch' <<<"$required" | sed 's/==\(.*\)/===\1.0/')"
    echo "phantom: making $venv with $("$base" --version), $torch (the largest download)"
    if [ "$("$python" --version 2>&1)" != "$("$base" --version)" ]; then
        [ ! -e "$venv/pyvenv.cfg" ] || rm -r "$venv"
        "$base" -m venv "$venv"
    fi
    pip_install --no-deps "$torch"
    # Not by importing it: that needs the libraries that are made below.
    sed -n "s/^cuda: .*= '\(.*\)'/\1/p" "$(site_packages)/torch/version.py" | grep -q '^13\.' ||
        fail "the $torch that pip found is not a build for CUDA 13; an index with such a build is needed"
    pip_install "${needs[@]}" $(grep -Ev "$with_torch" <<<"$required")
    # hqq without kernels of its own.
    DISABLE_CUDA=1 pip_install --no-deps --no-build-isolation $(grep -E "$with_torch" <<<"$required" | grep -v '^torch')
    [ -z "$with_images" ] || pip_install --no-deps "$with_images==0.$(($(cut -d. -f2 <<<"$torch") + 15)).*"
}

site_packages() {
    "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

# The structures and constants of the runtime come from NVIDIA's headers for the same CUDA, 2 MB.
get_headers() {
    local cuda wheel
    cuda="$(sed -n "s/^cuda: .*= '\(.*\)'/\1/p" "$(site_packages)/torch/version.py")"
    rm -rf "$venv/headers"
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$venv/headers" \
        "nvidia-cuda-runtime==$cuda.*" "nvidia-cuda-crt==$cuda.*" 2>"$venv/pip.log" || {
        cat "$venv/pip.log" >&2
        return 1
    }
    for wheel in "$venv"/headers/*.whl; do "$python" -m zipfile -e "$wheel" "$venv/headers"; done
}

build_library() {
    rm -rf "$library"
    mkdir -p "$library"
    cc -std=gnu11 -D_GNU_SOURCE -O1 -shared -fPIC -fvisibility=hidden -Wall -Wextra -Wno-unused-parameter \
        -Wno-unused-result -Wl,-soname,libphantom.so -I"$(echo "$venv"/headers/nvidia/cu*/include)" \
        -o "$library/libphantom.so" stand_in/runtime/*.c -lpthread
    "$python" stand_in/make_stubs.py "$(site_packages)" "$library"
    LD_LIBRARY_PATH="$library" LD_PRELOAD="$library/libphantom.so" "$python" stand_in/check.py
}

# Run a step unless what it depends on is as it was when it last succeeded: step NAME STATE COMMANDS...
step() {
    local stamp="$venv/.phantom_$1" state="$2" command start=$SECONDS
    [ "$(cat "$stamp" 2>/dev/null)" = "$state" ] && return
    rm -f "$stamp"
    for command in "${@:3}"; do "$command"; done
    echo "$state" >"$stamp"
    echo "phantom: $1 ready after $((SECONDS - start)) s"
}

[ "$(uname -sm)" = "Linux x86_64" ] || fail "the stand-in for CUDA is for Linux x86-64, this is $(uname -sm)"
for tool in cc nm readelf; do
    command -v "$tool" >/dev/null || fail "$tool is needed (on Debian and Ubuntu: apt install gcc binutils)"
done
base="$(find_python $(candidates))"
required="$(requirements)"
state="$base ${FSDP_QLORA_PHANTOM_TORCH:-} ${needs[*]} $with_images $required"
# The index may have newer versions on another day.
[ "$end" = lowest ] || state+=" $(date +%F)"
step packages "$state" install_packages get_headers
step library "$(cat "$venv/.phantom_packages" stand_in/runtime/* stand_in/make_stubs.py stand_in/check.py | cksum)" \
    build_library
