"""train.py with blocks as graphs, with blocks that no capture allows, or without graphs, on the
same micro-batches: `graphed_blocks.py graphs|reads|plain NOTES WORDS...`.

NOTES.RANK gets how often each graph's memory was filled.
"""

import sys
from pathlib import Path

from tests.helpers.graphs import graphed_rank, plain_rank, reading_rank

if __name__ == "__main__":
    way, notes, *words = sys.argv[1:]
    if way == "plain":
        sys.exit(plain_rank(words))
    sys.exit({"graphs": graphed_rank, "reads": reading_rank}[way](words, Path(notes)))
