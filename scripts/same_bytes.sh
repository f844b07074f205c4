#!/usr/bin/env bash
# Proves that a change leaves the numbers as they are: trains each train type, and dpo, grpo and distill, on 1 and on 2 ranks of a
# CPU, with the code of a commit and with that of the working tree, and compares what was saved and logged. Runs that
# the commit's code left half done, and its quantized cache, must be continued and used by the working tree's code.
#
# Losses, adapters and the optimizer's state may differ by a relative tolerance, tensors by norm: 1e-5, which sums in
# another order stay below in four steps; int8_lora 500 times that, since it rounds activations. With --tolerance 0, for
# a refactoring, not by a byte. A run in which the working tree's own code is killed and continues, and one that uses the
# commit's quantized cache, must be the same bytes as that code's whole run either way.
# Rows are padded and kernels are plain where the commit knows nothing else; without dropout where it draws other random
# numbers.
# Exit status 0 when all are equal, 1 when something differs.
#
#     bash scripts/same_bytes.sh HEAD
#     bash scripts/same_bytes.sh main qlora dpo     # these only
#     bash scripts/same_bytes.sh main --tolerance 0
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if (($# == 0)); then
    echo "usage: bash scripts/same_bytes.sh REV [TRAIN_TYPE...] [--tolerance T]" >&2
    exit 2
fi
commit="$(git rev-parse --verify --quiet "$1^{commit}")" || {
    echo "same_bytes: $1 is no commit of this repository." >&2
    exit 2
}
shift

# An environment that is active is used as it is; nothing of this tree needs to be installed in it.
needed='import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ("torch", "peft", "bitsandbytes", "hqq"))))'
python -c "$needed" 2>/dev/null || . scripts/setup_env.sh

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/rev"
git archive "$commit" | tar -x -C "$folder/rev"
# Several ranks run at a time, and only one thread each gives the same bytes on every machine.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 TQDM_DISABLE=1 CUDA_VISIBLE_DEVICES=""
PYTHONPATH="$PWD" python scripts/same_bytes.py "$folder/rev" "$PWD" "$folder" "$@"
