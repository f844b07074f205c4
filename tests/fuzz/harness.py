"""A case of the fuzz suite: one call on damaged input, which succeeds or is refused in our own
words, in time.
"""

import contextlib
import os
import random
import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from fsdp_qlora.checkpoint.checkpoint import DamagedCheckpoint
from fsdp_qlora.utils.errors import RunStopped, TrainingError, UserError

OURS = (UserError, TrainingError, RunStopped, DamagedCheckpoint)
CASES = int(os.environ.get("FUZZ_CASES", "40"))  # of each kind of input
SEED = int(os.environ.get("FUZZ_SEED", "0"))  # of the first case; the others follow
MOST_BYTES = 2 * 2**30  # of memory for one case: a damaged size could ask for all
SECONDS = 20  # for one case; the usual one takes a few hundredths

# Values that programs trip over, as JSON and as text.
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    10**40,
    -(10**40),
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\ud800",
    "../x",
    "/",
    "x" * 200,
    [],
    {},
    [[]],
    [None],
    {"a": {}},
    "é\u202e\x1b[2J",
]

Case = Callable[[random.Random, Path], object]


class TookTooLong(Exception):
    pass


def fuzz(case: Case, folder: Path, *, cases: int = CASES) -> None:
    """Run a kind's cases, each in a new folder below `folder`; fail with what every bad one did."""
    bad = []
    for seed in range(SEED, SEED + cases):
        place = folder / f"case_{seed}"
        place.mkdir(parents=True)
        with changed_directory(place):
            if reason := outcome(case, seed, place):
                bad.append(f"seed {seed}: {reason}")
    assert not bad, (
        f"{len(bad)} of {cases} cases (FUZZ_SEED and FUZZ_CASES=1 repeat one):\n"
    ) + "\n".join(bad)


def outcome(case: Case, seed: int, place: Path) -> str | None:
    """What is wrong with how a case ended; None where it succeeded or was refused as
    it should be.
    """
    try:
        with time_limit(SECONDS):
            case(random.Random(seed), place)
    except OURS as error:
        return None if str(error) else f"{type(error).__name__} without a message"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if "fsdp_qlora" in frame.filename
        ]
        at = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        return f"{type(error).__name__}{at}: {str(error)[:200]!a}"
    return None


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TookTooLong(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS, (psutil.Process().memory_info().vms + MOST_BYTES, limits[1])
    )
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def changed_directory(place: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(place)
    try:
        yield
    finally:
        os.chdir(before)


# --- damage ---


ODD = [
    b"\0",
    b"\xff\xfe",
    b"\n",
    b'"',
    b"{" * 2000,
    b"[" * 2000,
    b"9" * 5000,
    b"\x1b[2J",
    b"\xef\xbb\xbf",
]


def damaged_bytes(rng: random.Random, content: bytes) -> bytes:
    """Content with one to a few things done to it that happen to files, or that somebody does to
    them.
    """
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        start = rng.randrange(len(data) + 1)
        stop = min(len(data), start + rng.choice([1, 1, 4, 64, 4096]))
        match rng.randrange(8):
            case 0:
                data = data[:start]
            case 1:
                data[start:stop] = rng.randbytes(stop - start)
            case 2:
                data[start:stop] = b""
            case 3:
                data[start:start] = data[start:stop]
            case 4:
                data[start:start] = rng.choice(ODD)
            case 5:
                data[start:stop] = bytes(stop - start)
            case 6 if data:
                data[min(start, len(data) - 1)] ^= 1 << rng.randrange(8)
            case 7:
                data = bytearray(
                    rng.choice(
                        [b"", b"null", b"[]", b"{}", b"0", rng.randbytes(64), bytes(data) * 2]
                    )
                )
    return bytes(data)


def damaged_value(rng: random.Random, value: Any) -> Any:
    """A nest of objects and arrays with one of its values, or names, replaced or removed."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(sorted(value))
        changed = dict(value)
        if rng.random() < 0.15:
            del changed[name]
        else:
            changed[name] = damaged_value(rng, value[name])
        return changed
    if isinstance(value, list) and value and rng.random() < 0.7:
        index = rng.randrange(len(value))
        return [*value[:index], damaged_value(rng, value[index]), *value[index + 1 :]]
    return rng.choice(VALUES)


def damage_a_file(rng: random.Random, folder: Path) -> Path:
    """Damage or remove one file below a folder, or put a folder, a pipe or a link in its place;
    returns its path.
    """
    path = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    content = path.read_bytes()
    path.unlink()
    match rng.randrange(10):
        case 0:
            pass
        case 1:
            path.mkdir()
        case 2:
            path.symlink_to(rng.choice(["nowhere", ".", path.name]))
        case 3:
            os.mkfifo(path)
        case _:
            path.write_bytes(damaged_bytes(rng, content))
    return path
