"""What gpu.py measured as one Markdown file that a user can send: no secrets, folders, or names of machine and user."""

import getpass
import json
import re
import socket
import time
from typing import Any

from benchmarks.gpu_steps import GIB
from fsdp_qlora.output.redact import redact
from fsdp_qlora.version import VERSION

_PATH = re.compile(r"(?<![\w/.)])(?:file://|~|[A-Za-z]:)?/(?:[^\s/:\"',;)]+/)+([^\s/:\"',;)]*)")


def command(argv: list[str]) -> str:
    """The command, without the files that it writes."""
    given = iter(argv)
    kept = []
    for word in given:
        if word in ("--output", "--report"):
            next(given, None)
        elif not word.startswith(("--output=", "--report=")):
            kept.append(f'"{word}"' if " " in word else word)
    return " ".join(["python benchmarks/gpu.py", *kept])


def report(record: dict[str, Any], command: str) -> str:
    """The file's text. record: what gpu.py writes as JSON."""
    parts = record["parts"]
    rows = [each for result in parts.values() for each in result.get("rows", [])]
    said = "" if record["has_values"] else "On the stand-in for CUDA: no figure of time or loss means anything.\n\n"
    text = (
        f"# fsdp_qlora {VERSION} on {_box(parts).get('gpu', 'a CPU')}\n\n{time.strftime('%Y-%m-%d')}: `{command}`\n\n"
        f"{said}## The machine\n\n{_machine(parts)}\n\n"
        f"## Before and after\n\n{_table(('', 'unit', 'figures', 'ratio', 'aim', ''), map(_row, rows))}\n\n"
        f"## Steps\n\n{_table(('part', 'tokens', 'tokens/s', 's per step', 'MFU', 'GiB reserved'), _steps(parts))}\n\n"
        f"## Copies\n\n{_table(('', 'GB/s'), _copies(parts))}\n\n"
        f"## Peers\n\n{_table(('part', 'who', 's per step', 'loss', 'gradient norm', 'same work'), _peers(parts))}\n\n"
        f"## What did not run\n\n{_table(('part', 'why'), _not_run(parts))}\n\n"
        f"## Everything\n\n```json\n{json.dumps(record, indent=1)}\n```\n"
    )
    return scrub(text)


def scrub(text: str) -> str:
    """Without secrets, this machine's and user's names, and folders: of a path its last part stays."""
    text = _PATH.sub(lambda found: f".../{found[1]}", redact(text))
    for name, hidden in ((socket.gethostname(), "[host]"), (_user(), "[user]")):
        if len(name) > 2:
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", hidden, text)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return ""


def describe_row(row: dict[str, Any]) -> str:
    """One line for the screen."""
    aim = f"; {row['aim']}{_HOLDS[row['holds']]}" if row["aim"] else ""
    return f"{row['item']}, {row['unit']}: {_figures(row)}{aim}"


_HOLDS = {True: ": yes", False: ": NO", None: ": not known"}


def _row(row: dict[str, Any]) -> list[str]:
    shown = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
    return [row["item"], row["unit"], _figures(row), shown, row["aim"], _HOLDS[row["holds"]][2:] if row["aim"] else ""]


def _figures(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in row["figures"].items())


def _number(value: float | None) -> str:
    if value is None:
        return "out of memory"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _table(head: tuple[str, ...], lines: Any) -> str:
    rows = [[str(cell).replace("|", "/") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)) if rows else "Nothing."


def _box(parts: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = parts.get("box", {}).get("machine", {})
    return found


def _machine(parts: dict[str, Any]) -> str:
    box = {name: value for name, value in parts.get("box", {}).items() if name not in ("machine", "part_seconds")}
    return _table(("", ""), [(name, _plain(value)) for name, value in {**_box(parts), **box}.items()])


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name}: {each}" for name, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _steps(parts: dict[str, Any]) -> list[list[str]]:
    found = []
    for name, part in parts.items():
        for result in (part, part.get("blocks", {}), part.get("full_depth", {})):
            for batch, each in result.get("batches", {}).items():
                label = name if result is part else f"{name}, {result['layers']} blocks"
                if "out_of_memory" in each:
                    found.append([label, batch, "out of memory", "", "", ""])
                    continue
                memory = result["memory_bytes"].get(batch, {}).get("peak_reserved")
                mfu = each["mfu"]
                figures = [f"{each['tokens_per_second']:.0f}", f"{each['median_step_seconds']:.3f}"]
                figures += ["" if mfu is None else f"{100 * mfu:.0f}%", "" if memory is None else f"{memory / GIB:.2f}"]
                found.append([label, batch, *figures])
    return found


def _copies(parts: dict[str, Any]) -> list[list[str]]:
    copies = parts.get("copies", {})
    found = [[name, f"{speed:.1f}"] for name, speed in copies.get("gb_per_second", {}).items()]
    return found + [
        [f"decoding {name}", f"{each['gb_per_second']:.1f} ({100 * each['of_bandwidth']:.0f}%)"]
        for name, each in copies.get("decoding", {}).items()
    ]


def _peers(parts: dict[str, Any]) -> list[list[str]]:
    return [
        [part, name, *([each["error"], "", "", ""] if "error" in each else _peer(each))]
        for part, result in parts.items()
        for name, each in result.get("peers", {}).items()
    ]


def _peer(found: dict[str, Any]) -> list[str]:
    numbers = [f"{found[name]:.4g}" for name in ("median_step_seconds", "first_loss", "first_grad_norm")]
    return [*numbers, "yes" if found.get("same_work") else "no"]


def _not_run(parts: dict[str, Any]) -> list[list[str]]:
    found = []
    for name, result in parts.items():
        if why := result.get("left_out") or result.get("error"):
            lines = [line for line in result.get("output", "").splitlines() if line.strip()]
            found.append([name, f"{why}{f': {lines[-1].strip()}' if lines else ''}"])
        for row in result.get("rows", []):
            found += [[f"{name}: {kernel}", reason] for kernel, reason in row.get("not_run", {}).items()]
    return found
