"""Hundreds of images that nobody meant to be trained on, in rows, pairs and prompts."""

import io
import os
import random
import re
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp_qlora.data.run_data import RunData
from fsdp_qlora.data.text.image_store import load
from tests.data.rows import write_jsonl
from tests.data.test_images import as_taught, shows
from tests.data.test_images import model as model  # a fixture
from tests.data.test_images import prepare as prepare  # a fixture
from tests.parity.test_images import picture, png

Image = pytest.importorskip("PIL.Image")
ImageOps = pytest.importorskip("PIL.ImageOps")
pytestmark = pytest.mark.nightly
OBJECTIVES = ["sft", "dpo", "kto", "grpo"]
OF_GRPO = {"objective": "grpo", "rewards": ("length:1",), "max_completion_length": 8}
_STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.system")


@pytest.fixture
def read(prepare: Callable[..., RunData], tmp_path: Path) -> Iterator[Callable[..., RunData]]:
    """Reads a row for each file in the folder; checks that nothing starts, or takes much memory."""
    started = list[str]()
    hears = [True]
    sys.addaudithook(
        lambda event, args: started.append(str(args[0])) if hears and event in _STARTS else None
    )

    def call(names: list[str], objective: str) -> RunData:
        rows = [shows(name) for name in names]
        if objective != "grpo":
            rows = [as_taught(row, objective) for row in rows]
        path = write_jsonl(tmp_path / "rows.jsonl", rows)
        options = OF_GRPO if objective == "grpo" else {"objective": objective}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        data = prepare(path, max_bad_rows=0.99, **options)
        assert {*started} <= {sys.executable}  # which fills the chat template
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB
        assert len(data.train_rows) + len(data.rejected) == len(names)
        return data

    yield call
    hears.clear()


def damaged(seed: int) -> bytes:
    """An image of some format, whole or with some bytes that are others, too large or gone."""
    choose = random.Random(seed)
    content = io.BytesIO()
    kinds = (
        "PNG",
        "JPEG",
        "WEBP",
        "GIF",
        "BMP",
        "TIFF",
        "PPM",
        "ICO",
        "TGA",
        "PCX",
        "EPS",
        "PDF",
        "SGI",
        "MPO",
    )
    picture(40, 30, seed=seed).save(content, choose.choice(kinds))
    made = bytearray(content.getvalue())
    for _ in range(choose.randrange(6)):
        at = choose.randrange(choose.choice((64, len(made))))
        length = choose.choice((1, 4, 64, 10**6))
        wrong = choose.choice(
            (choose.randbytes(length), b"\xff" * 4, b"\0\0\x30\0", b"", bytes(made) * 9)
        )
        made[at : at + length] = wrong if len(wrong) < 10**5 else wrong[:9]
    return bytes(made) or b"x"


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_damaged_images_are_bad_rows_and_start_or_fill_nothing(objective, read, tmp_path, recwarn):
    names = [f"{seed}.bin" for seed in range(400)]
    for seed, name in enumerate(names):
        (tmp_path / name).write_bytes(damaged(seed))
    data = read(names, objective)
    assert 20 < len(data.train_rows) < 300
    assert all(re.fullmatch(r".*bin (cannot be read|and).*", why) for _, why in data.rejected)
    assert not [warning for warning in recwarn if "PIL" in str(warning.filename)]


def _animated(path: Path, seed: int) -> None:
    frames = [picture(30, 20, seed=seed + number) for number in range(20)]
    kind = ("GIF", "WEBP", "PNG")[seed % 3]
    frames[0].save(path, kind, save_all=True, append_images=frames[1:])


def _cmyk(path: Path, seed: int) -> None:
    picture(30, 20, seed=seed).convert("CMYK").save(path, ("JPEG", "TIFF")[seed % 2])


def _transparent(path: Path, seed: int) -> None:
    shown = picture(30, 20, seed=seed)
    if seed % 2:
        shown.quantize(9).save(path, "PNG", transparency=3)
    else:
        shown.putalpha(Image.linear_gradient("L").resize(shown.size))
        shown.save(path, "PNG")


def _turned(path: Path, seed: int) -> None:
    exif = Image.Exif()
    exif[274] = seed % 9  # 0 is none of those that there are
    picture(60, 20, seed=seed).save(path, ("JPEG", "PNG", "WEBP")[seed % 3], exif=exif)


def _deep(path: Path, seed: int) -> None:
    numbers = np.random.default_rng(seed).integers(2**16, size=(20, 30), dtype=np.uint16)
    if seed % 2:
        Image.fromarray(numbers).save(path, "PNG")
    else:
        Image.fromarray(numbers.astype(np.float32)).save(path, "TIFF")


def _huge(path: Path, seed: int) -> None:
    """A few KiB that unpack to gigabytes of pixels in RGB."""
    if seed % 2:
        Image.new("1", (30000 + seed, 9000)).save(path, "PNG")
        return
    # It says that it is huge, and has the pixels of a small one.
    made = bytearray(png(picture(30, 20, seed=seed)))
    made[16:24] = (2**31 - 1).to_bytes(4, "big") * 2
    path.write_bytes(made)


def _cut(path: Path, seed: int) -> None:
    file = io.BytesIO()
    picture(40, 30, seed=seed).save(file, ("PNG", "JPEG", "WEBP")[seed % 3])
    path.write_bytes(file.getvalue()[: len(file.getvalue()) // 2])


def _no_file(path: Path, seed: int) -> None:
    if seed % 4 == 1:
        path.mkdir()
    elif seed % 4 == 2:
        os.mkfifo(path)
    elif seed % 4 == 3:
        path.symlink_to(path)


# Makers of images that are read as Pillow reads them, and of those that are not.
GOOD: list[Callable[[Path, int], None]] = [_animated, _cmyk, _transparent, _turned]
BAD: list[Callable[[Path, int], None]] = [_deep, _huge, _cut, _no_file]


def _as_shown(path: Path) -> Any:
    """The pixels of the first frame, turned as the file says."""
    with Image.open(path) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_images_of_odd_kinds_are_read_as_shown_or_are_bad_rows(objective, read, tmp_path):
    names = []
    bad = []
    for seed in range(200):
        make = [*GOOD, *BAD][seed % 8]
        names.append(f"{seed}{make.__name__}.bin")
        make(tmp_path / names[-1], seed // 8)
        if make in BAD:
            bad.append(seed + 1)
    data = read(names, objective)
    assert [int(where.rpartition(":")[2]) for where, _ in data.rejected] == bad
    assert all(names[row - 1] in why for row, (_, why) in zip(bad, data.rejected, strict=True))
    if objective == "grpo":
        numbers = [prompt.row_number for prompt in data.prompts]
        shown = [bytes(name) for prompt in data.prompts for name in prompt.images.names]
    else:
        numbers = data.train.row_numbers.tolist()
        shown = [*map(bytes, data.train.images.names)]
    assert sorted([*numbers, *bad]) == [*range(1, 201)]
    for number, name in zip(numbers, shown, strict=True):
        assert np.array_equal(np.asarray(load(name)), _as_shown(tmp_path / names[number - 1]))
