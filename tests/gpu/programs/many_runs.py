"""Runs of train.py one after another in one process, which imports once.

    python -m tests.gpu.programs.many_runs FILE [--backend gloo]

FILE has a list of {"port", "options"} as JSON: a free port for the ranks of each run, and its
command line. The first run that fails ends the process: a GPU may be of no use after it.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from tests.gpu.programs.train import connect_by


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--backend", default="")
    args = parser.parse_args(argv)
    import train

    connect_by(args.backend)
    for run in json.loads(args.file.read_text()):
        print(f"== {' '.join(run['options'])}", flush=True)
        os.environ["MASTER_PORT"] = str(run["port"])
        if status := train.main(run["options"]):
            return int(status)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
