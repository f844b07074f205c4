"""Runs of train.py one after another in one process, which imports once: python -m tests.gpu.programs.many_runs FILE.

FILE has a list of command lines as JSON. The first run that fails ends the process: a GPU may be of no use after it.
"""

import json
import sys
from pathlib import Path


def main(argv: list[str]) -> int:
    import train

    for options in json.loads(Path(argv[0]).read_text()):
        print(f"== {' '.join(options)}", flush=True)
        if status := train.main(options):
            return int(status)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
