"""Files with the top tokens of a teacher at each learned token, which batches read.

A file holds some consecutive rows, whatever the number of ranks, so that a teacher continues where
it was interrupted. Its hash finds damage. Files may also be a stranger's, with a hash that is
right: so their types, shapes and values are checked before anything is learned from them.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.utils.verified_files import Arrays, Damaged, Metadata, read_verified, write_verified

# The folder of a teacher's files within the cache, as earlier versions called it: computing them
# again takes as long as the teacher's pass.
CACHE_FOLDER = "taught"
ROWS_PER_FILE = 256
_PIECE = 2**14  # tokens that are checked at a time: their values take 20 MiB at k = 64
# Of a sum of probabilities. With 16 bits for each logarithm the error is half a thousandth of the
# entropy.
_ROUNDING = 0.02


class TopTokenArrays(NamedTuple):
    """The arrays of a file."""

    ids: np.ndarray
    """int32 [targets, k]."""
    logps: np.ndarray
    """float16 [targets, k + 1]: the last is of all other tokens."""

    @classmethod
    def build(cls, arrays: Arrays, metadata: Metadata) -> "TopTokenArrays":
        return cls(**arrays)

    @property
    def digest(self) -> str:
        """A hash of the values."""
        total = hashlib.blake2b(digest_size=16)
        for array in self:
            total.update(np.ascontiguousarray(array).data)
        return total.hexdigest()


class Unusable(Exception):
    """A teacher's probabilities cannot be learned from. The message is a reason in words."""


def bytes_per_token(k: int) -> int:
    """Bytes of a file for each learned token.

    They are k ids in 32 bits, and k + 1 log-probabilities in 16: the last is of all other tokens.
    """
    return 4 * k + 2 * (k + 1)


def rounded(found: np.ndarray, k: int) -> TopTokenArrays:
    """The arrays of a file. found: float32 [targets, 2 * k + 1], as `TopTokens` has them."""
    with np.errstate(invalid="ignore"):  # of ids that are no numbers: `TeacherCache.check` says so
        return TopTokenArrays(found[:, :k].astype(np.int32), found[:, k:].astype(np.float16))


class TeacherCache:
    """The files of a table.

    Args:
        root: the folder that theirs is in.
        key: all that they depend on besides the table, as JSON.
        k: top tokens of each.
        vocabulary: ids are below it.
    """

    def __init__(self, table: TokenizedRows, root: Path, key: str, k: int, vocabulary: int) -> None:
        self.table = table
        self.k = k
        self.vocabulary = vocabulary
        digest = hashlib.sha256(
            json.dumps([table.digest, key, k, ROWS_PER_FILE]).encode()
        ).hexdigest()
        self.folder = root / digest[:40]
        self.starts = np.concatenate([[0], table.num_targets.cumsum()])
        self.files = np.split(
            np.arange(len(table)), range(ROWS_PER_FILE, len(table), ROWS_PER_FILE)
        )
        self._arrays: dict[int, TopTokenArrays] = {}

    def path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.safetensors"

    def num_targets(self, number: int) -> int:
        """The learned tokens of a file's rows."""
        rows = self.files[number]
        return int(self.starts[rows[-1] + 1] - self.starts[rows[0]])

    def read(self, number: int) -> bool:
        """Map a file and check all of it; False if there is none.

        Raises:
            Unusable: it is damaged, or not of these rows.
        """
        check_header = partial(self._check_header, number)
        try:
            arrays = read_verified(self.path(number), TopTokenArrays.build, check_header)
        except Damaged as error:
            raise Unusable(getattr(error.__cause__, "strerror", None) or str(error)) from error
        if arrays is None:
            return False
        self.check(number, arrays)
        # Mapped until the end of the run: the system keeps in memory what batches read.
        self._arrays[number] = arrays
        return True

    def _check_header(self, number: int, forms: Mapping[str, str]) -> None:
        """Raise Damaged for other tensors than a file of these rows has."""
        count = self.num_targets(number)
        expected = {"ids": f"I32 {[count, self.k]}", "logps": f"F16 {[count, self.k + 1]}"}
        if forms.keys() != expected.keys():
            raise Damaged(
                f"it has the tensors {', '.join(sorted(forms))[:100]!a}, not ids and logps"
            )
        for name, form in expected.items():
            if forms[name] != form:
                raise Damaged(f"{name} is {forms[name]:.100}, and these rows need {form}")

    def check(self, number: int, arrays: TopTokenArrays) -> None:
        """Check the values of a file.

        Raises Unusable, which names the first row that cannot be learned from.
        """
        ids, logps = arrays
        for start in range(0, len(ids), _PIECE):
            piece = slice(start, start + _PIECE)
            # In float32, since a sum of 16-bit numbers would have an error of its own.
            problems = _problems(ids[piece], logps[piece].astype(np.float32), self.vocabulary)
            for is_bad, what in problems:
                if is_bad.any():
                    token = int(self.starts[self.files[number][0]]) + start + int(is_bad.argmax())
                    row = np.searchsorted(self.starts, token, side="right") - 1
                    raise Unusable(
                        f"row {self.table.describe_numbers(np.array([row]))} of the "
                        f"dataset has {what}"
                    )

    def write(self, number: int, arrays: TopTokenArrays) -> None:
        """Write a file atomically.

        Raises OSError or SafetensorError; then nothing of it is left.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        write_verified(self.path(number), arrays._asdict(), arrays)

    def target_values(self, table: TokenizedRows, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """The values that `Divergence` reads, for the targets of some rows.

        They are teacher_ids, int64 [N, k], and teacher_logps, float32 [N, k + 1].
        """
        # Empty arrays first, so that no rows at all have the types, too.
        pieces = [(np.zeros((0, self.k), np.int32), np.zeros((0, self.k + 1), np.float16))]
        for row in rows:
            number = int(row) // ROWS_PER_FILE
            first, last = self.starts[row : row + 2] - self.starts[number * ROWS_PER_FILE]
            ids, logps = self._arrays[number]
            pieces.append((ids[first:last], logps[first:last]))
        ids, logps = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
        if not len(ids):
            ids = np.zeros((1, self.k), np.int32)
            logps = np.zeros((1, self.k + 1), np.float16)
        values = {"teacher_ids": ids.astype(np.int64), "teacher_logps": logps.astype(np.float32)}
        return {name: torch.from_numpy(array) for name, array in values.items()}


def _problems(ids: np.ndarray, logps: np.ndarray, vocabulary: int) -> Iterator[tuple[Any, str]]:
    """Each problem that values may have: whether each token has it, bool [tokens], and its name."""
    in_order = np.sort(ids, axis=1)
    yield (
        (in_order[:, 0] < 0) | (in_order[:, -1] >= vocabulary),
        (f"an id below 0, or not below {vocabulary}"),
    )
    yield (in_order[:, 1:] == in_order[:, :-1]).any(axis=1), "an id twice for one token"
    yield ~np.isfinite(logps).all(axis=1), "a log-probability that is not finite"
    yield (logps > 0).any(axis=1), "a log-probability above 0"
    sums = np.exp(logps).sum(axis=1)
    yield abs(sums - 1) > _ROUNDING, "probabilities that do not add up to 1"
    yield (logps[:, 1:-1] > logps[:, :-2]).any(axis=1), "a likelier token behind another one"
