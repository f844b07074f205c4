"""train.py with blocks as graphs, or with the same micro-batches and none.

    graphed_blocks.py plain|graphs NOTES WORDS...

NOTES.RANK gets how often each graph's memory was filled, and the bytes of the graphs.
"""

import sys
from pathlib import Path

from tests.helpers.graphs import graphed_rank, plain_rank

if __name__ == "__main__":
    way, notes, *words = sys.argv[1:]
    sys.exit(graphed_rank(words, Path(notes)) if way == "graphs" else plain_rank(words))
