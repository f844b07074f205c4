"""Folders of a teacher that somebody has changed, most with a right hash: refused, or read as they
are meant.
"""

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.fuzz.harness import VALUES, damaged_bytes, damaged_value, fuzz
from tests.preferences.hostile import (
    PLACES,
    TENSORS,
    Tensors,
    edit_settings,
    files_of,
    replace,
    rewrite,
)
from tests.preferences.test_teacher_folder import K, group, options, original, read

__all__ = ["group", "options", "original"]  # fixtures
pytestmark = pytest.mark.slow

DTYPES = [
    torch.int8,
    torch.int16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float32,
    torch.float64,
    torch.bfloat16,
]
NUMBERS = [
    -(2**31),
    -5.0,
    -1,
    0,
    0.001,
    1,
    5,
    319,
    320,
    2**31 - 1,
    6e4,
    math.inf,
    -math.inf,
    math.nan,
]


def of_another_type(rng: random.Random, tensors: Tensors) -> Tensors:
    name = rng.choice(["ids", "logps"])
    return {**tensors, name: tensors[name].to(rng.choice(DTYPES))}


def with_other_numbers(rng: random.Random, tensors: Tensors) -> Tensors:
    """Some numbers of one or all tokens; each may stay what it is."""
    tensor = tensors[rng.choice(["ids", "logps"])]
    for _ in range(rng.choice([1, 1, 3])):
        number = rng.choice([*NUMBERS, float(tensor.flatten()[rng.randrange(tensor.numel())])])
        if tensor.dtype == torch.int32:
            number = int(number) if math.isfinite(number) and abs(number) < 2**31 else 2**31 - 1
        rows = slice(None) if rng.random() < 0.2 else rng.randrange(len(tensor))
        tensor[rows, rng.randrange(tensor.shape[1])] = number
    return tensors


def of_another_shape(rng: random.Random, tensors: Tensors) -> Tensors:
    size = rng.choice([0, 1, 3, 89, 90, 91, 10_000])
    shapes = [(size, K), (size, K + 1), (90, size), (size,), (), (1, 90, K), (90, K, 1), (K, 90)]
    names = rng.choice([["ids"], ["logps"], ["ids", "logps"]])
    return {
        **tensors,
        **{name: torch.zeros(rng.choice(shapes), dtype=tensors[name].dtype) for name in names},
    }


def with_other_names(rng: random.Random, tensors: Tensors) -> Tensors:
    names = rng.choices(
        ["ids", "logps", "logits", "", "\u00e9" * 200, "__metadata__x"], k=rng.randrange(4)
    )
    return {name: tensors[rng.choice(["ids", "logps"])].clone() for name in names}


def in_another_order(rng: random.Random, tensors: Tensors) -> Tensors:
    """Of tokens, or of the outcomes of each: only the first can be learned from."""
    axis = rng.choice([0, 1])
    both = rng.random() < 0.5
    order = torch.tensor(rng.sample(range(len(tensors["ids"])), len(tensors["ids"])))
    if axis:
        order = torch.tensor(rng.sample(range(K), K))
    last = tensors["logps"][:, K:]
    logps = (
        torch.cat([tensors["logps"][:, :K].index_select(axis, order), last], dim=1)
        if both
        else tensors["logps"]
    )
    return {"ids": tensors["ids"].index_select(axis, order), "logps": logps}


def as_listed(rng: random.Random, tensors: Tensors) -> Tensors:
    return TENSORS[rng.choice(sorted(TENSORS))][0](tensors)


CHANGES: list[Callable[[random.Random, Tensors], Tensors]] = [
    as_listed,
    of_another_type,
    with_other_numbers,
    with_other_numbers,
    of_another_shape,
    with_other_names,
    in_another_order,
]


def change_tensors(rng: random.Random, folder: Path) -> None:
    change = rng.choice(CHANGES)
    rewrite(files_of(folder)[0], lambda tensors: change(rng, tensors))


def change_settings(rng: random.Random, folder: Path) -> None:
    path = folder / "teacher.json"
    content = json.loads(path.read_text())
    if rng.random() < 0.5:
        key = damaged_value(rng, json.loads(content["key"]))
        edit_settings(folder, key=rng.choice([json.dumps(key), key]))
    else:
        path.write_text(
            json.dumps(
                rng.choice([damaged_value(rng, content), {**content, "top_k": rng.choice(VALUES)}])
            )
        )


def change_bytes(rng: random.Random, folder: Path) -> None:
    path = rng.choice([*files_of(folder), folder / "teacher.json"])
    path.write_bytes(damaged_bytes(rng, path.read_bytes()))


def change_places(rng: random.Random, folder: Path) -> None:
    [file] = files_of(folder)
    path = rng.choice([file, folder / "teacher.json", file.parent])
    if path.is_dir():
        shutil.rmtree(path)
        path.touch()
    replace(path, rng.choice(sorted(PLACES))) if rng.random() < 0.8 else path.unlink()


@pytest.mark.usefixtures("group")
def test_teachers_folders(options, original, tmp_path):
    """What is read is a distribution over distinct tokens, from the likeliest on."""

    def case(rng: random.Random, place: Path) -> None:
        folder = Path(shutil.copytree(original, place / "taught"))
        rng.choice(
            [
                change_tensors,
                change_tensors,
                change_tensors,
                change_settings,
                change_bytes,
                change_places,
            ]
        )(rng, folder)
        told = read(options, folder)
        ids = told["teacher_ids"]
        logps = told["teacher_logps"].double()
        assert ids.shape == (90, K) and logps.shape == (90, K + 1)
        assert all(len({*row}) == K and min(row) >= 0 and max(row) < 320 for row in ids.tolist())
        assert (logps <= 0).all() and (logps.exp().sum(dim=1) - 1).abs().max() < 0.03
        assert (logps[:, 1:-1] <= logps[:, :-2]).all()

    fuzz(case, tmp_path)
