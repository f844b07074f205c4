#!/usr/bin/env bash
# Collects in DIR, as wheels of 7 MB together, what scripts/gpu_check.sh installs on a GPU machine without an index:
# for Linux x86-64 and Python 3.12, besides torch 2.11 (CUDA 13), transformers 5.17, pandas, pyarrow, xxhash, pyyaml
# and tqdm.
#
#     bash scripts/gpu_wheels.sh DIR [flash4]
#
# With flash4 FlashAttention 4 and what it needs instead, for `--parts attention --fa4`. One of its wheels has 92 MB, more
# than a lent machine may take at a time, so it is cut: DIR_flash4_1 has its first half (44 MiB), DIR_flash4_2 the second
# and the small wheels (54 MiB). gpu_check.sh DIR installs them as soon as both folders are there.
#
# bitsandbytes comes with CUDA libraries for a dozen versions; only that of CUDA 13.0 and the one for CPUs are kept.
set -euo pipefail
folder="${1:?usage: gpu_wheels.sh DIR [flash4]}"
python="${PYTHON:-python3}"
needed=("bitsandbytes>=0.50" "peft>=0.21" "datasets>=5.0" dill multiprocess termcolor)
needed+=(pytest pluggy iniconfig)

loaded="$(mktemp -d)"
trap 'rm -rf "$loaded"' EXIT

fetch() {
    "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
        --implementation cp --python-version 3.12 --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 \
        --platform manylinux2014_x86_64 --dest "$loaded" "$1"
}

collect_flash4() {
    local first="${folder}_flash4_1" second="${folder}_flash4_2" dsl large
    for package in "flash-attn-4>=4.0.0b18" "nvidia-cutlass-dsl>=4.6" quack-kernels "apache-tvm-ffi<0.2" \
        torch-c-dlpack-ext einops protobuf; do
        fetch "$package"
    done
    dsl="$(basename "$loaded"/nvidia_cutlass_dsl-*.whl | cut -d- -f2)"
    for library in core base cu13; do fetch "nvidia-cutlass-dsl-libs-$library==$dsl"; done
    rm -rf "$first" "$second"
    mkdir -p "$first" "$second"
    large="$(ls -S "$loaded"/*.whl | head -n 1)"
    split --number 2 "$large" "$large."
    mv "$large.aa" "$first/"
    mv "$large.ab" "$second/"
    rm "$large"
    mv "$loaded"/*.whl "$second/"
    du -sh "$first" "$second"
}

if [ "${2:-}" = flash4 ]; then
    collect_flash4
    exit
fi
mkdir -p "$folder"
for package in "${needed[@]}"; do fetch "$package"; done
# hqq has no wheel on the index, and is built without kernels of its own.
DISABLE_CUDA=1 "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$loaded" "hqq>=0.2.8"

"$python" - "$loaded" <<'PY'
"""Leave out bitsandbytes' libraries for other CUDA versions than 13.0."""
import sys
import zipfile
from pathlib import Path

for wheel in Path(sys.argv[1]).glob("bitsandbytes-*.whl"):
    small = wheel.with_suffix(".small")
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED) as kept:
        for entry in whole.infolist():
            library = Path(entry.filename).name
            is_other = library.startswith("libbitsandbytes_") and library.split(".")[0] not in (
                "libbitsandbytes_cuda130",
                "libbitsandbytes_cpu",
            )
            if not is_other:
                kept.writestr(entry, whole.read(entry))
    small.replace(wheel)
PY
mv "$loaded"/*.whl "$folder"/
du -sh "$folder"
