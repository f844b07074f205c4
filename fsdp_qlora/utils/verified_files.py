"""Files that a later start reads again, and that are checked as they are read.

A safetensors file has a digest of its content in its header. Of files too large for one digest,
each chunk of a tensor has a checksum, so that parts can be read and verified alone; a description
beside the files, which verifies itself, has these.
"""

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import check_is_file, staged_file

Arrays = Mapping[str, np.ndarray]
Metadata = Mapping[str, str]


class Damaged(UserError):
    """A file is not as it was written. The message is the reason."""


class HasDigest(Protocol):
    """The content of a file."""

    @property
    def digest(self) -> str:
        """A hash of the whole content."""


ContentT = TypeVar("ContentT", bound=HasDigest)


# --- whole files ---


def write_verified(
    path: Path, arrays: Arrays, content: HasDigest, metadata: Metadata | None = None
) -> None:
    """Write and flush a safetensors file with a digest, atomically.

    Args:
        content: the owner of the arrays.
    Raises:
        OSError or SafetensorError: it cannot be written; then nothing of it is left.
    """
    with staged_file(path) as partial:
        save_file(dict(arrays), partial, {**(metadata or {}), "digest": content.digest})


def read_verified(
    path: Path,
    build: Callable[[Arrays, Metadata], ContentT],
    check_header: Callable[[Mapping[str, str]], None] = lambda forms: None,
    *,
    is_hashed: bool = True,
) -> ContentT | None:
    """Map a file's arrays, and build its content from them; None if there is no file.

    All processes of a machine share the mapped pages, which are read-only: a second rank costs no
    memory. The whole content is hashed, since a damaged value would be learned without a word.

    Args:
        build: makes the content of arrays and metadata.
        check_header: raises Damaged for tensors of other names, types or shapes, before one is
            made: a stranger's file may claim any size. It gets name -> such as "I32 [5, 3]".
        is_hashed: false for a file that another process of this start has hashed.
    Raises:
        Damaged: the file cannot be read, or has changed since it was written.
    """
    try:
        check_is_file(path)
        # Through torch because safetensors' numpy side copies: 240 MB for 240 MB against none,
        # measured.
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            forms = {name: file.get_slice(name) for name in names}
            check_header(
                {name: f"{form.get_dtype()} {form.get_shape()}" for name, form in forms.items()}
            )
            arrays = {name: file.get_tensor(name).numpy() for name in names}
            metadata = file.metadata() or {}
        for array in arrays.values():
            array.flags.writeable = False
        content = build(arrays, metadata)
        if is_hashed and content.digest != metadata.get("digest"):
            raise ValueError("its content has changed since it was written")
        return content
    except FileNotFoundError:
        return None
    except (
        SafetensorError,
        OSError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RecursionError,
    ) as error:
        raise Damaged(str(error)) from error


# --- parts of files ---


class ChunkChecksums(NamedTuple):
    """The checksums of a tensor's bytes, chunk by chunk."""

    chunk: int
    """Bytes of a chunk; the last one may be shorter."""
    crc32: list[int]

    @classmethod
    def of(cls, content: torch.Tensor, chunk: int) -> "ChunkChecksums":
        """The checksums of bytes, uint8 [bytes]."""
        return cls(chunk, [zlib.crc32(part.numpy()) for part in content.split(chunk)])

    def whole_chunks(self, start: int, stop: int, total: int) -> tuple[int, int]:
        """The bounds of the chunks that hold bytes [start, stop) of `total`.

        A checksum is of all bytes of a chunk.
        """
        end = -(-stop // self.chunk) * self.chunk
        return start // self.chunk * self.chunk, min(end, total)

    def check(self, content: torch.Tensor, begin: int, *, file: Path, name: str) -> None:
        """Check whole chunks of the tensor `name`, which begin at byte `begin`.

        Raises Damaged, which names the first that has changed.
        """
        found = ChunkChecksums.of(content, self.chunk).crc32
        first = begin // self.chunk
        # strict=False: the tensor goes on behind these chunks.
        for place, (actual, expected) in enumerate(
            zip(found, self.crc32[first:], strict=False), start=first
        ):
            if actual != expected:
                at = place * self.chunk
                last = min(at + self.chunk, begin + len(content))
                raise Damaged(f"{file}: bytes {at} to {last} of {name} have changed")
