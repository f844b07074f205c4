#!/usr/bin/env bash
# Rewards on images: a model that says some colour learns from its own answers, of which rewards.py scores the right
# ones with 1. Needs what run.sh needs.
#
#     bash examples/images/grpo.sh
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/guesses.sh"

fsdp-qlora train --objective grpo --train_type lora --model_name runs/guesses --dataset runs/squares/questions.jsonl \
    --rewards examples/images/rewards.py:names_color --num_generations 8 --batch_size 32 --max_completion_length 4 \
    --num_epochs 4 --lr 5e-3 --output_dir runs/images_grpo --nproc_per_node 2 --log_to stdout "$@"
python examples/curve.py runs/images_grpo --keys reward --out examples/images/grpo.svg
