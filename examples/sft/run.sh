#!/usr/bin/env bash
# Supervised fine-tuning: QLoRA on the 240 rows that come with the program, on two CPU ranks.
#
#     bash examples/sft/run.sh
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

fsdp-qlora train --config demo --model_name demo/model --output_dir runs/sft --nproc_per_node 2 --log_to stdout "$@"
python examples/curve.py runs/sft --keys loss eval_loss --out examples/sft/curve.svg
