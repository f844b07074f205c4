#!/usr/bin/env bash
# An agent: a random model learns to call a tool until its answer says that nothing is left.
#
#     bash examples/agent/run.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
python examples/agent/make.py --output_dir demo/agent

fsdp-qlora train --objective grpo --model_name demo/agent --dataset demo/agent/rows.jsonl \
    --environment examples/agent/counter.py:Counter --max_turns 8 --num_generations 32 --batch_size 64 \
    --max_completion_length 96 --context_length 160 --num_epochs 2 --max_steps 30 --lr 5e-3 --lr_scheduler constant \
    --precision fp32 --output_dir runs/agent --nproc_per_node 2 --log_to stdout "$@"
python examples/curve.py runs/agent --keys reward --out examples/agent/curve.svg
