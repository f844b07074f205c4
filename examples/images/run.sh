#!/usr/bin/env bash
# Images: a tiny random model learns the colour of a square. Needs Pillow (the extra images) and transformers 5.18.
#
#     bash examples/images/run.sh
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

python examples/images/make.py runs/squares
fsdp-qlora train --train_type full --model_name runs/squares/model --dataset runs/squares/rows.jsonl --eval_fraction 0.1 \
    --batch_size 8 --num_epochs 4 --lr 3e-3 --output_dir runs/images --nproc_per_node 2 --log_to stdout "$@"
python examples/curve.py runs/images --keys loss eval_loss --out examples/images/curve.svg
