"""Whether torch and bitsandbytes run on the stand-in: the last step of scripts/phantom.sh."""

import re
import sys
from importlib.metadata import version


def use_the_device() -> None:
    import torch

    if torch.version.cuda is None:
        sys.exit(f"phantom: torch {torch.__version__} is not a CUDA build")
    ones = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
    (ones @ ones + 1).sum().item()

    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    dequantize_4bit(*quantize_4bit(ones))


def main() -> None:
    try:
        use_the_device()
    except (ImportError, OSError, RuntimeError) as error:
        lacking = re.search(r"undefined symbol: (\w+)", str(error))
        if lacking is None:
            raise
        sys.exit(
            f"phantom: the stand-in lacks symbol {lacking[1]}, needed by torch {version('torch')}: "
            "add it to stand_in/runtime"
        )


if __name__ == "__main__":
    main()
