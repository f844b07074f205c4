"""The large runs whose memory is counted, and what the stand-in for CUDA has counted for them.

    FSDP_QLORA_GPU_TESTS=stand-in python -m tests.gpu.reserved     # on the stand-in: writes
    reserved.json

Needed after each change of what a step allocates. Rounded and split by torch's own allocator, which
is the same on the stand-in; cuBLAS' workspaces and the context are not.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch

from tests.gpu.check import IS_STAND_IN
from tests.gpu.runs import last_line, run

FIGURES = Path(__file__).parent / "reserved.json"
SHAPES: dict[str, list[object]] = {
    "8b on two ranks, 2 x 2048": ["--shape", "8b"],
    "8b on two ranks under ddp, 2 x 2048": ["--shape", "8b", "--strategy", "ddp"],
    "8b on two ranks, offloaded, 1 x 8192": [
        "--shape",
        "8b",
        "--offload",
        "--batch_size",
        1,
        "--length",
        8192,
    ],
    "70b on two ranks, offloaded, 2 x 2048": ["--shape", "70b", "--offload"],
}


def count(name: str, folder: Path) -> dict[str, int]:
    """Bytes: reserved and allocated at the peak, and allocated before the first step."""
    return last_line(run(["-m", "tests.gpu.programs.reserved", *SHAPES[name]], folder, seconds=600))


def main(names: list[str]) -> int:
    """Count all runs, or those whose names are given, and write each down as it is known."""
    if not IS_STAND_IN:
        sys.exit("The figures come from the stand-in for CUDA: see stand_in/README.md.")
    found = json.loads(FIGURES.read_text())["bytes"] if FIGURES.exists() else {}
    for name in names or SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = count(name, Path(folder))
        FIGURES.write_text(
            json.dumps({"torch": torch.__version__, "bytes": found}, indent=2) + "\n"
        )
        print(f"{name}: {found[name]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
