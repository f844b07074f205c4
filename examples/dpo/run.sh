#!/usr/bin/env bash
# Preferences: DPO on pairs of which the shorter answer is chosen. The frozen 4-bit base is the reference.
#
#     bash examples/dpo/run.sh
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

python examples/dpo/pairs.py runs/pairs.jsonl
fsdp-qlora train --objective dpo --model_name demo/model --dataset runs/pairs.jsonl --eval_fraction 0.1 \
    --context_length 256 --batch_size 2 --max_steps 20 --lr 1e-4 --beta 0.3 --output_dir runs/dpo --nproc_per_node 2 \
    --log_to stdout "$@"
python examples/curve.py runs/dpo --keys loss rewards/margins --out examples/dpo/curve.svg
