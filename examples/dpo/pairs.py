"""Make pairs of which the shorter answer is the better one, from the rows that come with the
program.

python examples/dpo/pairs.py runs/pairs.jsonl
"""

import json
import re
import sys
from pathlib import Path

ROWS = Path(__file__).parents[2] / "fsdp_qlora/data/alpaca_demo.jsonl"


def pairs() -> list[dict[str, str]]:
    """Each row whose answer has several sentences: the first one alone is chosen, the whole answer
    is rejected.
    """
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    made = []
    for row in rows:
        first, *others = re.split(r"(?<=[.!?])\s+", row["output"])
        if others and len(first) > 20:
            made.append({"instruction": row["instruction"], "input": row["input"], "chosen": first})
            made[-1]["rejected"] = row["output"]
    return made


if __name__ == "__main__":
    out = Path(sys.argv[1])
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(pair) + "\n" for pair in pairs()))
