#!/usr/bin/env bash
# Makes the environment of the tests in tests/phantom: torch's CUDA build on a stand-in for the CUDA runtime, without a
# GPU and without NVIDIA's libraries. About 700 MB to download, 2 GB on disk; takes no time when it is up to date.
#
#     bash scripts/phantom.sh
#
# FSDP_QLORA_PHANTOM names the environment (default: .venv-phantom in the repository), FSDP_QLORA_PHANTOM_TORCH another
# version of torch than the one that the tests are run with.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="${FSDP_QLORA_PHANTOM:-$PWD/.venv-phantom}"
torch_version="${FSDP_QLORA_PHANTOM_TORCH:-2.11.0}"
python="$venv/bin/python"
library="$venv/phantom"

# What needs torch is installed without its needs: torch's own would bring 2.7 GB of nvidia-*. Theirs are in the second list.
with_torch=(peft accelerate bitsandbytes)
without_torch=("transformers==5.17.*" "datasets>=4.8" safetensors psutil pyyaml tqdm pytest filelock "typing-extensions>=4.10"
    "setuptools<82" "sympy>=1.13.3" "networkx>=2.5.1" jinja2 fsspec "numpy>=2.0" einops termcolor wheel)

fail() {
    echo "phantom: $*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in python3.12 python3 python3.13 python3.11 python3.10; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' \
            >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.10 to 3.13 with the venv module was found on PATH"
}

pip_install() {
    # Its warning about the nvidia-* packages that torch lacks is what we want.
    "$python" -m pip install --quiet --disable-pip-version-check --no-input "$@" 2>"$venv/pip.log" || {
        cat "$venv/pip.log" >&2
        return 1
    }
}

install_packages() {
    local base
    echo "phantom: making $venv with torch $torch_version (the largest download)"
    if [ ! -x "$python" ]; then
        base="$(find_python)"
        "$base" -m venv "$venv"
    fi
    # "===" leaves out builds with a suffix, such as +cpu.
    pip_install --no-deps "torch===$torch_version"
    # Not by importing it: that needs the libraries that are made below.
    sed -n "s/^cuda: .*= '\(.*\)'/\1/p" "$(site_packages)/torch/version.py" | grep -q '^13\.' ||
        fail "the torch $torch_version that pip found is not a build for CUDA 13; an index with such a build is needed"
    pip_install "${without_torch[@]}"
    pip_install --no-deps "${with_torch[@]}"
    # hqq without kernels of its own.
    DISABLE_CUDA=1 pip_install --no-deps --no-build-isolation "hqq>=0.2.8"
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
        -o "$library/libphantom.so" tests/phantom/runtime/*.c -lpthread
    "$python" tests/phantom/make_stubs.py "$(site_packages)" "$library"
    LD_LIBRARY_PATH="$library" LD_PRELOAD="$library/libphantom.so" "$python" tests/phantom/check.py
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
step packages "$torch_version ${with_torch[*]} ${without_torch[*]}" install_packages get_headers
step library "$torch_version $(cat tests/phantom/runtime/* tests/phantom/make_stubs.py tests/phantom/check.py | cksum)" build_library
