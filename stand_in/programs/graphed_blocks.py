"""train.py with blocks as graphs, with blocks that no capture allows, without graphs on the same
micro-batches, or as it chooses: `graphed_blocks.py graphs|reads|plain|chosen NOTES WORDS...`.

NOTES.RANK gets how often each graph's memory was filled, of graphs and reads.
"""

import sys
from pathlib import Path

from tests.helpers.graphs import choosing_rank, graphed_rank, plain_rank, reading_rank

RANKS = {
    "graphs": graphed_rank,
    "reads": reading_rank,
    "plain": lambda words, _: plain_rank(words),
    "chosen": choosing_rank,
}

if __name__ == "__main__":
    way, notes, *words = sys.argv[1:]
    sys.exit(RANKS[way](words, Path(notes)))
