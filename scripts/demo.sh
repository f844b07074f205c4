#!/usr/bin/env bash
# From a fresh clone to a fine-tuned model: makes an environment, downloads a small model, trains it with a sharded
# 4-bit base on all GPUs (without a GPU: on two CPU ranks), and shows what the adapter does when PEFT loads it.
# It writes only to .venv and demo/. Arguments are passed to train.py:
#
#     bash scripts/demo.sh --lora_rank 32
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup_env.sh

step() {
    printf '\n== [%d min %02d s] %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$*"
}

step "Getting a pretrained model"
python scripts/demo_model.py --output_dir demo/model

ranks=$(python -c 'import torch; print(torch.cuda.device_count() or 2)')
# torchrun would give each rank one thread; without a GPU the ranks share all cores.
threads=$(($(getconf _NPROCESSORS_ONLN) / ranks))
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}"
command=(torchrun --nproc_per_node "$ranks" train.py --config configs/demo.yaml --model_name demo/model
    --output_dir demo/output --resume auto:replace "$@")
step "Training: ${command[*]}"
"${command[@]}"

step "What the adapter does"
TQDM_DISABLE=1 python -W ignore::FutureWarning scripts/demo_report.py --model_name demo/model --output_dir demo/output
step "Its answer on the ranks that trained it"
python -m fsdp_qlora generate --adapter demo/output --nproc_per_node "$ranks" --max_new_tokens 40 \
    --prompt "Explain why leaves change colour in autumn."
step "Done: the adapter is in demo/output"
