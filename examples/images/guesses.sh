# Sourced by dpo.sh and grpo.sh: trains the tiny model of make.py to say a colour, whichever it is (runs/guesses).
. "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

python examples/images/make.py runs/squares
fsdp-qlora train --train_type full --model_name runs/squares/model --dataset runs/squares/guesses.jsonl \
    --batch_size 8 --num_epochs 2 --lr 3e-3 --output_dir runs/guesses --nproc_per_node 2 --log_to stdout
