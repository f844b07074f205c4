"""Fine-tune a language model with sharded, quantized weights: `python train.py --help`.

The same as `fsdp-qlora train`, for a clone that is not installed: what `train` does is in
fsdp_qlora/commands/train.py.
"""

import sys

from fsdp_qlora import __main__ as program


def main(argv: list[str]) -> int:
    return program.main(["train", *argv])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
