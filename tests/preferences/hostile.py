"""What somebody may do to a folder that `fsdp-qlora teach` has written, with a hash that is right
afterwards.
"""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from fsdp_qlora.data.batches.teacher_cache import TopTokenArrays

Tensors = dict[str, torch.Tensor]


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def rewrite(path: Path, change: Callable[[Tensors], Tensors]) -> None:
    """Change the tensors of a file, and make its hash that of the changed ones."""
    tensors = {name: tensor.contiguous() for name, tensor in change(load_file(path)).items()}
    digest = ""
    if {"ids", "logps"} <= tensors.keys():
        digest = TopTokenArrays(_bytes(tensors["ids"]), _bytes(tensors["logps"])).digest
    save_file(tensors, path, {"digest": digest})


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    return np.asarray(tensor.flatten().view(torch.uint8).numpy())


def _put(name: str, value: float, column: int = 0) -> Callable[[Tensors], Tensors]:
    """Put a value into the third token of a file."""

    def change(tensors: Tensors) -> Tensors:
        tensors[name][2, column] = value
        return tensors

    return change


def _to(name: str, dtype: torch.dtype) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: tensors[name].to(dtype)}


def _each(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: change(tensor) for name, tensor in tensors.items()}


def _logps(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, "logps": change(tensors["logps"])}


def _twice(tensors: Tensors) -> Tensors:
    tensors["ids"][2, 1] = tensors["ids"][2, 0]
    return tensors


# name -> (change, what is said of it)
TENSORS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "ids of 64 bits": (_to("ids", torch.int64), "ids is I64"),
    "ids of 8 bits": (_to("ids", torch.uint8), "ids is U8"),
    "ids that are fractions": (_to("ids", torch.float32), "ids is F32"),
    "log-probabilities of 32 bits": (_to("logps", torch.float32), "logps is F32"),
    "log-probabilities in bf16": (_to("logps", torch.bfloat16), "logps is BF16"),
    "whole log-probabilities": (_to("logps", torch.int32), "logps is I32"),
    "an id below 0": (_put("ids", -1), "an id below 0"),
    "the least id": (_put("ids", -(2**31)), "an id below 0"),
    "an id behind the vocabulary": (_put("ids", 320), "not below 320"),
    "an id twice": (_twice, "an id twice"),
    "a log-probability above 0": (_put("logps", 5.0), "above 0"),
    "all log-probabilities above 0": (_logps(torch.abs), "above 0"),
    "NaN": (_put("logps", torch.nan), "not finite"),
    "minus infinity": (_put("logps", -torch.inf, -1), "not finite"),
    "probabilities of 0.1 in all": (_logps(lambda logps: logps - 2.3), "do not add up to 1"),
    "probabilities of 0.9 in all": (_put("logps", -30.0), "add up to 1"),
    "another order": (
        lambda tensors: {n: t[:, [1, 0, *range(2, t.shape[1])]] for n, t in tensors.items()},
        "likelier",
    ),
    "twice the tokens": (_each(lambda tensor: torch.cat([tensor, tensor])), "these rows need I32"),
    "a token less": (_each(lambda tensor: tensor[1:]), "these rows need I32"),
    "no tokens": (_each(lambda tensor: tensor[:0]), "these rows need I32"),
    "a column less": (_each(lambda tensor: tensor[:, 1:]), "these rows need I32"),
    "one dimension": (_each(torch.flatten), "these rows need I32"),
    "three dimensions": (_each(lambda tensor: tensor[None]), "these rows need I32"),
    "other sides": (_each(lambda tensor: tensor.T), "these rows need I32"),
    "another name": (
        lambda tensors: {"ids": tensors["ids"], "logits": tensors["logps"]},
        "'ids, logits'",
    ),
    "a tensor more": (lambda tensors: {**tensors, "more": torch.zeros(1)}, "'ids, logps, more'"),
    "no tensors": (lambda tensors: {}, "not ids and logps"),
}


def _socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    socket.socket(socket.AF_UNIX).bind(path.name)
    os.chdir(before)


# name -> what is put in the place of a file
PLACES: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a socket": _socket,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path: path.symlink_to(path.name),
}


def replace(path: Path, how: str) -> None:
    path.unlink()
    PLACES[how](path)


def edit_settings(folder: Path, **changed: object) -> None:
    """Change teacher.json; None removes an entry."""
    path = folder / "teacher.json"
    content = {**json.loads(path.read_text()), **changed}
    path.write_text(
        json.dumps({name: value for name, value in content.items() if value is not None})
    )
