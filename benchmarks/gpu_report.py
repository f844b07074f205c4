"""The report of gpu.py: one Markdown file to send, without paths, secrets, and names of machine and
user.
"""

import getpass
import json
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from fsdp_qlora import __version__
from fsdp_qlora.utils.redact import redact

_GIB = 2**30
_PATH = re.compile(r"(?<![\w/.)])(?:file://|~|[A-Za-z]:)?/(?:[^\s/:\"',;)]+/)+([^\s/:\"',;)]*)")
_OUTCOME = re.compile(r"^tests/\S+::.* (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", re.MULTILINE)
_FAILURE = re.compile(r"^(?:FAILED|ERROR) tests/\S+?::(.*)$", re.MULTILINE)
_PEER = "PEFT + bitsandbytes"


def command(argv: list[str]) -> str:
    """The command, without the files that it writes."""
    given = iter(argv)
    kept = []
    for word in given:
        if word in ("--output", "--report", "--log"):
            next(given, None)
        elif not word.startswith(("--output=", "--report=", "--log=")):
            kept.append(f'"{word}"' if " " in word else word)
    return " ".join(["python benchmarks/gpu.py", *kept])


def report(record: dict[str, Any], command: str) -> str:
    """The file's text. record: what gpu.py writes as JSON."""
    parts = record["parts"]
    rows = [each for result in parts.values() for each in result.get("rows", [])]
    said = (
        ""
        if record["has_values"]
        else ("On the stand-in for CUDA: no figure of time or loss means anything.\n\n")
    )
    text = (
        f"# fsdp_qlora {__version__} on {_box(parts).get('gpu', 'a CPU')}\n\n"
        f"{time.strftime('%Y-%m-%d')}: `{command}`\n\n"
        f"{said}## What went wrong\n\n{_table(('part', 'why'), _went_wrong(parts))}\n\n"
        f"## Planned and measured\n\n{_table(_PLANNED, _planned(parts))}\n\n"
        f"## Figures\n\n{_table(('', 'unit', 'figures', 'ratio', 'aim', ''), map(_row, rows))}\n\n"
        f"## Peers\n\n{_table(_PEERS, _peers(parts))}\n\n"
        f"## Steps\n\n{_table(_STEPS, _steps(parts))}\n\n"
        f"## Tests\n\n{_table(('part', 'tests'), _tests(parts))}\n\n"
        f"## The machine\n\n{_machine(parts)}\n\n"
        f"## Time\n\n{_table(('part', 'seconds', 'CPU seconds'), _times(parts))}\n\n"
        f"## Everything\n\n```json\n{json.dumps(record, indent=1)}\n```\n"
    )
    return scrub(text)


def scrub(text: str) -> str:
    """Without secrets, this machine's and user's names,
    and folders: of a path its last part stays.
    """
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


def count_tests(log: str) -> dict[str, Any]:
    """Read the output of pytest -v, also of an unfinished run.

    Returns how many tests passed, failed .., and the line of each failure.
    """
    found: dict[str, Any] = {"tests": Counter(outcome.lower() for outcome in _OUTCOME.findall(log))}
    return found | {"failures": _FAILURE.findall(log)}


def describe_row(row: dict[str, Any]) -> str:
    """One line for the screen."""
    aim = f"; {row['aim']}{_HOLDS[row['holds']]}" if row["aim"] else ""
    return f"{row['item']}, {row['unit']}: {_figures(row)}{aim}"


_HOLDS = {True: ": yes", False: ": NO", None: ": not known"}


def _row(row: dict[str, Any]) -> list[str]:
    shown = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
    return [
        row["item"],
        row["unit"],
        _figures(row),
        shown,
        row["aim"],
        _HOLDS[row["holds"]][2:] if row["aim"] else "",
    ]


def _figures(row: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_number(value)}" for name, value in row["figures"].items())


def _number(value: float | None) -> str:
    if value is None:
        return "out of memory"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _table(head: tuple[str, ...], lines: Any) -> str:
    rows = [[str(cell).replace("|", "/") for cell in line] for line in lines]
    return (
        "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows))
        if rows
        else "Nothing."
    )


def _box(parts: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = parts.get("box", {}).get("machine", {})
    return found


def _machine(parts: dict[str, Any]) -> str:
    left_out = ("machine", "has_values", "part_seconds", "part_cpu_seconds")
    box = {name: value for name, value in parts.get("box", {}).items() if name not in left_out}
    return _table(
        ("", ""), [(name, _plain(value)) for name, value in {**_box(parts), **box}.items()]
    )


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name}: {_plain(each)}" for name, each in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


_STEPS = ("part", "tokens", "tokens/s", "s per step", "MFU", "GiB reserved")
_PLANNED = (
    "part",
    "",
    "tokens/s",
    "planned",
    "of PEFT + bitsandbytes",
    "GiB",
    "planned",
    "of PEFT + bitsandbytes",
)


def _planned(parts: dict[str, Any]) -> list[list[str]]:
    """Speed and memory of each planned step, beside the plan and, where the step is the peers',
    beside theirs.
    """
    speed, reserved = _of_peer(parts)
    return [
        [
            *(
                part,
                name,
                _number(each["tokens_per_second"]),
                _number(each["planned_tokens_per_second"]),
            ),
            _share(each["tokens_per_second"], speed if part in ("speed", "types") else 0.0),
            *(_number(each["measured_gib"]["reserved"]), _number(each["planned_gib"]["reserved"])),
            _share(
                each["measured_gib"]["reserved"], reserved if part in ("speed", "types") else 0.0
            ),
        ]
        for part, name, each in _planned_steps(parts)
    ]


def _planned_steps(parts: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for part, result in parts.items():
        for name, each in result.get("planned", {}).items():
            yield part, name, each


def _of_peer(parts: dict[str, Any]) -> tuple[float, float]:
    """Tokens/s and GiB reserved of PEFT + bitsandbytes; 0 where it did not run."""
    result = parts.get("speed", {})
    rows = [
        row["figures"] for row in result.get("rows", []) if row["item"].startswith("beside peers")
    ]
    memory = result.get("peers", {}).get(_PEER, {}).get("peak_bytes", {}).get("peak_reserved", 0)
    return (rows[0].get(_PEER) or 0.0 if rows else 0.0), memory / _GIB


def _share(value: float, of: float) -> str:
    return f"{value / of:.2f}" if of else ""


def _steps(parts: dict[str, Any]) -> list[list[str]]:
    found = []
    for name, part in parts.items():
        for batch, each in part.get("batches", {}).items():
            if "out_of_memory" in each:
                found.append([name, batch, "out of memory", "", "", ""])
                continue
            memory = part["memory_bytes"].get(batch, {}).get("peak_reserved")
            mfu = each["mfu"]
            figures = [f"{each['tokens_per_second']:.0f}", f"{each['median_step_seconds']:.3f}"]
            figures += [
                "" if mfu is None else f"{100 * mfu:.0f}%",
                "" if memory is None else f"{memory / _GIB:.2f}",
            ]
            found.append([name, batch, *figures])
    return found


_PEERS = ("part", "who", "s per step", "GiB reserved", "loss", "gradient norm", "same work")


def _peers(parts: dict[str, Any]) -> list[list[str]]:
    return [
        [part, name, *([each["error"], "", "", "", ""] if "error" in each else _peer(each))]
        for part, result in parts.items()
        for name, each in result.get("peers", {}).items()
    ]


def _peer(found: dict[str, Any]) -> list[str]:
    seconds, loss, norm = (
        f"{found[name]:.4g}" for name in ("median_step_seconds", "first_loss", "first_grad_norm")
    )
    memory = found.get("peak_bytes", {}).get("peak_reserved")
    gib = "" if memory is None else f"{memory / _GIB:.2f}"
    return [seconds, gib, loss, norm, "yes" if found.get("same_work") else "no"]


def _tests(parts: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (name, _counted(result["tests"])) for name, result in parts.items() if "tests" in result
    ]


def _counted(tests: dict[str, int]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in tests.items()) or "none"


def _times(parts: dict[str, Any]) -> list[list[str]]:
    names = ("part_seconds", "part_cpu_seconds")
    return [
        [part, *(f"{result.get(name, 0):.0f}" for name in names)] for part, result in parts.items()
    ]


def _went_wrong(parts: dict[str, Any]) -> list[list[str]]:
    found = []
    for name, result in parts.items():
        if why := result.get("left_out") or result.get("error"):
            lines = [line for line in result.get("output", "").splitlines() if line.strip()]
            found.append([name, f"{why}{f': {lines[-1].strip()}' if lines else ''}"])
        found += [[name, line] for line in result.get("failures", [])]
    return found


def describe(result: dict[str, Any]) -> list[str]:
    """A part's results in a few lines, for people."""
    if "left_out" in result:
        return [f"left out: {result['left_out']}"]
    lines = [f"FAILED: {result['error']}"] if "error" in result else []
    lines += (
        [f"tests: {_counted(result['tests'])}", *result["failures"]] if "tests" in result else []
    )
    lines += [describe_row(each) for each in result.get("rows", [])]
    for _, name, speed, planned_speed, _, gib, planned, _ in _planned({"": result}):
        lines.append(
            f"{name}: {gib} GiB, planned {planned}; {speed} tokens/s, planned {planned_speed}"
        )
    lines += [f"{name}: {row}" for name, row in result.get("peers", {}).items()]
    for batch, row in result.get("batches", {}).items():
        if "out_of_memory" in row:
            lines.append(f"{batch}: out of memory")
            continue
        memory = result["memory_bytes"].get(batch, {})
        reserved = (
            (f", {memory['peak_reserved'] / _GIB:.1f} GiB reserved")
            if "peak_reserved" in memory
            else ""
        )
        share = f", MFU {100 * row['mfu']:.0f}%" if row["mfu"] else ""
        losses = f", loss {row['losses'][0]:.3f} to {row['losses'][-1]:.3f}"
        speed = f"{row['tokens_per_second']:.0f} tokens/s, {row['median_step_seconds']:.2f} s"
        lines.append(f"{batch}: {speed}{share}{reserved}{losses}")
    for name in (
        "ms_per_token",
        "answers_gib",
        "step_after_answers_gib",
        "load_seconds",
        "fused_differs",
    ):
        lines += [f"{name}: {_plain(result[name])}"] if result.get(name) else []
    figures = (
        "matmul_tflops",
        "copy_gb_s",
        "from_host_gb_s",
        "register_seconds_of_2_gib",
        "nf4_decode_ms",
        "nf4_error",
    )
    known = {name: result[name] for name in figures if name in result}
    return lines + ([_plain(known)] if known else [])
