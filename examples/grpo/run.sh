#!/usr/bin/env bash
# Rewards: GRPO on the model's own completions. The sharded model samples four for each prompt, and rewards.py scores
# them by the share of short words.
#
#     bash examples/grpo/run.sh
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

fsdp-qlora train --objective grpo --model_name demo/model --dataset alpaca_demo \
    --rewards examples/grpo/rewards.py:short_words --num_generations 4 --batch_size 4 --max_completion_length 24 \
    --context_length 256 --max_steps 30 --lr 1e-3 --output_dir runs/grpo --nproc_per_node 2 --log_to stdout "$@"
python examples/curve.py runs/grpo --keys reward --out examples/grpo/curve.svg
