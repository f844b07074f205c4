"""The likeliest tokens of a teacher at each learned token: files beside the tokenized rows, which batches read.

A file holds some consecutive rows, whatever the number of ranks, so that a teacher continues where it was interrupted.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.utils.files import refusal_named, staged_file
from fsdp_qlora.utils.text import warn_from_any_rank

ROWS_PER_FILE = 256
TEACHER = "teacher.json"  # the key and k of the files in a folder that `fsdp-qlora teach` has written

Arrays = tuple[np.ndarray, np.ndarray]
OfTargets = Callable[[TokenizedRows, np.ndarray], dict[str, torch.Tensor]]
"""A table and some of its rows -> values of their targets, in order; of one that counts nothing if they have none."""


def bytes_per_token(k: int) -> int:
    """Bytes of a file for each learned token: k ids in 32 bits, and k + 1 log-probabilities in 16."""
    return 4 * k + 2 * (k + 1)


def target_numbers(table: TokenizedRows, rows: np.ndarray) -> dict[str, torch.Tensor]:
    """The number of each target among all of the table."""
    ends, counts = table.num_targets.cumsum()[rows], table.num_targets[rows]
    numbers = np.repeat(ends - np.cumsum(counts), counts) + np.arange(counts.sum())
    return {"table_indices": torch.from_numpy(numbers if len(numbers) else np.zeros(1, np.int64))}


class TaughtRows:
    """The files of a table.

    Args:
        root: the folder that theirs is in. key: all that they depend on besides the table, as JSON. k: likeliest tokens
            of each.
    """

    def __init__(self, table: TokenizedRows, root: Path, key: str, k: int) -> None:
        self.table, self.k = table, k
        digest = hashlib.sha256(json.dumps([table.digest, key, k, ROWS_PER_FILE]).encode()).hexdigest()
        self.folder = root / digest[:40]
        self.starts = np.concatenate([[0], table.num_targets.cumsum()])
        self.files = np.split(np.arange(len(table)), range(ROWS_PER_FILE, len(table), ROWS_PER_FILE))
        self._arrays: dict[int, Arrays] = {}

    def read(self, number: int) -> bool:
        """Map a file, and compare its hash; False if there is none or it is damaged."""
        path = self._path(number)
        try:
            with safe_open(path, framework="pt") as file:
                arrays = file.get_tensor("ids").numpy(), file.get_tensor("logps").numpy()
                if (file.metadata() or {}).get("digest") != _digest(arrays):
                    raise ValueError("its content has changed since it was written")
        except FileNotFoundError:
            return False
        except (SafetensorError, OSError, ValueError) as error:
            warn_from_any_rank(f"The teacher's probabilities in {path} are damaged ({error}): making them again.")
            return False
        self._arrays[number] = arrays
        return True

    def write(self, number: int, found: np.ndarray) -> None:
        """Write a file atomically. found: float32 [targets, 2 * k + 1], as of `divergence.likeliest`."""
        arrays = found[:, : self.k].astype(np.int32), found[:, self.k :].astype(np.float16)
        with refusal_named("teacher", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with staged_file(self._path(number)) as partial:
                save_file({"ids": arrays[0], "logps": arrays[1]}, partial, {"digest": _digest(arrays)})

    def of_targets(self, table: TokenizedRows, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """The arguments of `Teacher`: teacher_ids, int64 [N, k], and teacher_logps, float32 [N, k + 1]."""
        pieces = [(np.zeros((0, self.k), np.int32), np.zeros((0, self.k + 1), np.float16))]
        for row in rows:
            number = int(row) // ROWS_PER_FILE
            first, last = self.starts[row : row + 2] - self.starts[number * ROWS_PER_FILE]
            pieces.append((self._arrays[number][0][first:last], self._arrays[number][1][first:last]))
        ids, logps = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
        if not len(ids):
            ids, logps = np.zeros((1, self.k), np.int32), np.zeros((1, self.k + 1), np.float16)
        values = {"teacher_ids": ids.astype(np.int64), "teacher_logps": logps.astype(np.float32)}
        return {name: torch.from_numpy(array) for name, array in values.items()}

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.safetensors"


def _digest(arrays: Arrays) -> str:
    total = hashlib.blake2b(digest_size=16)
    for array in arrays:
        total.update(np.ascontiguousarray(array).data)
    return total.hexdigest()
