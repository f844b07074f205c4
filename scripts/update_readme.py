"""Rewrites the option tables in README.md from fsdp_qlora/config/options.py; --check only tells whether they differ."""

import sys
from pathlib import Path

from fsdp_qlora.config.options import DEFAULTS, option_help

README = Path(__file__).resolve().parent.parent / "README.md"
START, END = "<!-- options -->\n", "<!-- /options -->"


def option_tables() -> str:
    """One Markdown table per heading of --help."""
    lines = []
    for heading, options in option_help().items():
        lines += ["", f"**{heading}**", "", "| option | default | |", "|---|---|---|"]
        lines += [f"| `{name}` | {_shown(getattr(DEFAULTS, name))} | {text} |" for name, text in options.items()]
    return "\n".join([*lines, "", ""])


def _shown(value: object) -> str:
    if value is None or value in ("", ()):
        return ""
    if isinstance(value, tuple):
        value = " ".join(value)
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def main() -> int:
    text = README.read_text()
    before, rest = text.split(START)
    _, after = rest.split(END)
    new = before + START + option_tables() + END + after
    if "--check" in sys.argv[1:]:
        return int(new != text)
    README.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
