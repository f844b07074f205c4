"""Advice on rows of no known format: the --columns that may read them, or what they seem to be."""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence

from fsdp_qlora.data.content import Row

# What is in the names of columns that ask, and of those that answer.
_ASKS = re.compile(
    r"^(?!.*id$).*(instruct|question|prompt|query|problem|input|task|request|dialog|article|document|message)", re.I
)
_ANSWERS = re.compile(r"answer|response|output|completion|solution|result|summary|highlight|reply|message|bot", re.I)
_LONG = 40  # characters, of an answer whose column is not called so
_DOCUMENT = 200  # characters, of a text among other columns
_SHOWN = 600  # characters, of a row
# What is in a row, as JSON -> what the rows seem to be.
_SEEM = {
    r'"children": \[': "search trees, which do not say what is the answer",
    r'"replies": \[': "trees of messages",
    r'"(functions?|tools)": \[': "questions with tools and without answers, as in a benchmark",
    r'"[^"]*(instruction|question|prompt|query|problem)[^"]*": "': "questions without answers, as in a test set",
    "": "no questions with answers, no chats and no texts",
}


def advise(rows: Sequence[Row], works: Callable[[Sequence[str]], bool]) -> str:
    """Advise on rows of no known format: --columns with which it `works`, or else what they seem to be."""
    if found := next(filter(works, _candidates(rows)), None):
        return f"Say which column is which, such as --columns {shlex.join(found)}"
    row = json.dumps(rows[0], ensure_ascii=False, default=str)
    seems = next(what for pattern, what in _SEEM.items() if re.search(pattern, row, re.I))
    return f"The rows seem to be {seems}. The first: {row[:_SHOWN]}{'...' if len(row) > _SHOWN else ''}"


def _candidates(rows: Sequence[Row]) -> Iterator[list[str]]:
    """The best first."""
    yield from ([f"messages={name}"] for name, value in rows[0].items() if isinstance(value, list))
    columns = {name: [str(row[name]) for row in rows if isinstance(row.get(name), str)] for name in rows[0]}
    lengths = {name: sum(map(len, texts)) / len(rows) for name, texts in columns.items() if any(texts)}
    asked = next(filter(_ASKS.search, lengths), None)
    if asked is not None:
        behind = [name for name in lengths if name != asked and _ANSWERS.search(name)]
        behind += [name for name in [*lengths][[*lengths].index(asked) + 1 :] if lengths[name] >= _LONG]
        yield from ([f"instruction={asked}", f"output={name}"] for name in behind[:1])
    elif lengths:
        text, *others = sorted(lengths, key=lambda name: -lengths[name])
        if len(columns) == 1 or lengths[text] > max([_DOCUMENT, *(5 * lengths[name] for name in others)]):
            yield [f"text={text}"]
