"""Writes docs/options.md, and the types of the keywords of `train`, from the fields of TrainConfig.

--check only says whether it is up to date.

python scripts/update_docs.py
"""

import json
import sys
import textwrap
from pathlib import Path
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin

from fsdp_qlora.config.marks import MAY_DIFFER, NOT_EMPTY, OF_ADAPTER, PER_NODE, Mark, of_quantizer
from fsdp_qlora.config.options import DEFAULTS, LIMITS, names_marked, option_types
from fsdp_qlora.config.text import option_help, type_text, value_text
from fsdp_qlora.config.train_types import TRAIN_TYPES

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = ROOT / "docs" / "options.md"
TYPES = ROOT / "fsdp_qlora" / "config" / "train_options.pyi"

INTRODUCTION = """\
# Options

These are the flags of `fsdp-qlora train` (and `train.py`), the keys of YAML files for `--config`,
and the keywords of [`fsdp_qlora.train`](python_api.md). Flags override YAML keys. Separate the
items of lists by commas or spaces.
`fsdp-qlora train --help` prints the same texts. `python scripts/update_docs.py` writes this page.
"""


def options_page() -> str:
    """The text of docs/options.md: the options under the headings of --help, then rules for groups
    of them.
    """
    parts = [INTRODUCTION]
    for heading, options in option_help().items():
        parts.append(f"## {heading[0].upper()}{heading[1:]}\n")
        parts += [_entry(name, text) for name, text in options.items()]
    return "\n".join([*parts, *_marks()])


def _entry(name: str, text: str) -> str:
    """The option with its type, limit and default in a line; what it may be; its help."""
    hint = option_types()[name]
    limit = LIMITS.get(name)
    values = type_text(hint)
    default = value_text(getattr(DEFAULTS, name))
    choices = values.strip("{}").split(",") if values.startswith("{") else []
    allowed = f"{limit.allowed}; " if limit and limit != NOT_EMPTY and not choices else ""
    lines = [f"**`--{name} {'NAME' if choices else values}`** ({allowed}default `{default}`)"]
    if choices:
        lines.append(
            _wrapped(
                f"{'One or more' if get_origin(hint) is tuple else 'One'} of {_names(choices)}."
            )
        )
    return "\\\n".join([*lines, _wrapped(text.replace("*", "\\*"))]) + "\n"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, width=118, break_long_words=False, break_on_hyphens=False)


def _marks() -> list[str]:
    quantizers = sorted({kind.quantizer for kind in TRAIN_TYPES.values() if kind.quantizer})
    same = [name for name in vars(DEFAULTS) if name not in names_marked(MAY_DIFFER)]
    sentences = [
        f"To resume an unfinished run, keep the values of {_names(same)}. All other options may "
        "differ, as long as the rows and the base weights stay the same.",
        f"All nodes of a run need the same options, except for {_marked(PER_NODE)}.",
        f"Only train types with an adapter take {_marked(OF_ADAPTER)}.",
        *(
            f"Only train types with the quantizer {name} take {_marked(of_quantizer(name))}."
            for name in quantizers
        ),
    ]
    return ["## Option rules\n", *(_wrapped(sentence) + "\n" for sentence in sentences)]


def _marked(mark: Mark) -> str:
    return _names(names_marked(mark))


def _names(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def types_file() -> str:
    """The text of fsdp_qlora/config/train_options.pyi: what an editor shows of the keywords of
    `train`.
    """
    lines = [
        '"""The keywords of `fsdp_qlora.train`, for editors and type checkers. Written by '
        'scripts/update_docs.py."""',
        "# ruff: noqa",
        "# fmt: off",
        "",
        "from collections.abc import Sequence",
        "from os import PathLike",
        "from typing import Any, Literal, TypedDict",
        "",
        "class TrainOptions(TypedDict, total=False):",
    ]
    texts = {name: text for options in option_help().values() for name, text in options.items()}
    for name, hint in option_types().items():
        accepted = "Any" if name in ("dataset", "eval_dataset") else _accepted(hint)  # rows, too
        lines += [f"    {name}: {accepted}", f"    {json.dumps(texts[name], ensure_ascii=False)}"]
    return "\n".join(lines) + "\n"


def _accepted(hint: object) -> str:
    """The Python values that an option takes, as a type."""
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(_accepted(member) for member in get_args(hint))
    if get_origin(hint) is Literal:
        return f"Literal[{', '.join(map(repr, get_args(hint)))}]"
    if get_origin(hint) is tuple:
        return "str | PathLike[str] | Sequence[Any]"
    return {str: "str | PathLike[str]", NoneType: "None"}.get(hint) or hint.__name__  # type: ignore[attr-defined]


def main(argv: list[str]) -> int:
    contents = {OPTIONS: options_page(), TYPES: types_file()}
    if "--check" in argv:
        return int(
            any(not path.is_file() or path.read_text() != text for path, text in contents.items())
        )
    for path, text in contents.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
