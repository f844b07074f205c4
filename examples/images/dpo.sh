#!/usr/bin/env bash
# Preferences on images: a model that says some colour learns which of two is right. Needs what run.sh needs.
#
#     bash examples/images/dpo.sh
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/guesses.sh"

fsdp-qlora train --objective dpo --train_type lora --model_name runs/guesses --dataset runs/squares/pairs.jsonl \
    --eval_fraction 0.1 --batch_size 4 --num_epochs 4 --lr 3e-3 --output_dir runs/images_dpo --nproc_per_node 2 \
    --log_to stdout "$@"
python examples/curve.py runs/images_dpo --keys loss rewards/accuracies --out examples/images/dpo.svg
