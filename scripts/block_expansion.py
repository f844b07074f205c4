"""Add blocks to a model that change nothing until they are trained (LLaMA Pro, Wu et al. 2024).

    python scripts/block_expansion.py --model_name meta-llama/Llama-2-7b-hf --output_dir expanded --expansion_rate 0.1
    torchrun train.py --train_type bnb_llama_pro --llama_pro_path expanded

The result is a complete model folder; its config.json says which blocks are new.
"""

import argparse
import logging
import sys
from pathlib import Path

from fsdp_qlora.commands.expand import expand_model
from fsdp_qlora.errors import UserError


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--model_name", required=True, help="name on the Hugging Face hub, or local folder")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder to make")
    parser.add_argument(
        "--expansion_rate", type=float, default=0.1, help="new blocks as a share of the model's (default: 0.1)"
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        expand_model(arguments.model_name, arguments.output_dir, expansion_rate=arguments.expansion_rate)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
