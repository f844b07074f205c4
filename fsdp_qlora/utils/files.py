"""Atomic and durable writing of files and folders, fingerprints, and checks of folder names."""

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NamedTuple

from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.redact import redact_values

PARTIAL = ".partial"
ROWS_IN_MEMORY = "rows"  # the folder of the cache for rows that Python code gives
_HEAD_BYTES = 2**20  # contains the names, types and shapes of all tensors of a usual file
_SAMPLES = 64
_SAMPLE_BYTES = 4096
_STALE_SECONDS = 3600.0  # a partial file not changed for so long has no writer any more
_URLS = ("s3", "gcs", "gs", "az", "sftp")  # fsspec's file systems that can be written to


class FileRecord(NamedTuple):
    """A file's expected size in bytes and SHA-256."""

    size: int
    sha256: str


def record_of(path: Path) -> FileRecord:
    """The size and hash of a file."""
    with open_named(path) as file:
        digest = hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]
        return FileRecord(file.tell(), digest.hexdigest())


def records_of(paths: Sequence[Path]) -> list[FileRecord]:
    """The sizes and hashes of files.

    Threads hash them in parallel, since hashlib releases the GIL.
    """
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(record_of, paths))


def files_difference(folder: Path, expected: Mapping[str, FileRecord]) -> str | None:
    """The first file of a folder that is missing or differs in size or content; None if none is."""
    # All sizes first: they cost nothing, and hashing many gigabytes takes minutes.
    for name, record in expected.items():
        path = folder / name
        if not path.is_file():
            return f"{name} {'is not a file' if path.exists() else 'is missing'}"
        size = path.stat().st_size
        if size != record.size:
            return f"{name} has {size} bytes instead of {record.size}"
    paths = [folder / name for name in expected]
    for name, record in zip(expected, records_of(paths), strict=True):
        if record != expected[name]:
            return f"{name} has changed: its SHA-256 differs"
    return None


class NotAFile(OSError):
    """A path leads to a folder, a pipe, a device or a socket, or to more bytes than are read.

    Unlike other errors of reading, this one does not go away when it is tried again.
    """


def open_named(
    path: Path, mode: str = "rb", *, most_bytes: int | None = None, follow: bool = True
) -> IO[Any]:
    """Open a file that a row, an option or a folder of others names, without waiting.

    Args:
        follow: whether `path` may be a link.
    Raises:
        NotAFile: it is a pipe, a device, a folder or longer than `most_bytes`.
        OSError: it cannot be opened.
    """
    # Opening a pipe waits for its writer, and opening a terminal may make it this process's own.
    flags = os.O_NONBLOCK | os.O_NOCTTY
    if not follow:
        flags |= os.O_NOFOLLOW

    def opener(name: str, mode_flags: int) -> int:
        # Only for a clear message: O_NOFOLLOW refuses a link that is put there after this.
        if path.is_symlink() and not follow:
            raise OSError(errno.EINVAL, "it is a link", str(path))
        descriptor = os.open(name, mode_flags | flags, 0o666)
        # The open file is asked, and not the path, which may lead elsewhere by now.
        status = os.fstat(descriptor)
        reason = ""
        if not stat.S_ISREG(status.st_mode):
            reason = "it is not a file but a folder, a pipe, a device or a socket"
        if most_bytes is not None and status.st_size > most_bytes:
            reason = (
                f"it has {status.st_size / 2**20:.0f} MiB, more than {most_bytes / 2**20:.0f} MiB"
            )
        if reason:
            os.close(descriptor)
            raise NotAFile(errno.EINVAL, reason, str(path))
        return descriptor

    return open(path, mode, opener=opener, encoding=None if "b" in mode else "utf-8")


def read_named(path: Path, most_bytes: int | None = None) -> bytes:
    """The content of a file that `open_named` opens."""
    # As long as the file says: one of /proc says 0, and may have no end.
    with open_named(path, most_bytes=most_bytes) as file:
        content: bytes = file.read(os.fstat(file.fileno()).st_size)
        return content


def check_is_file(path: Path) -> None:
    """Raise OSError, as `open_named` does, for a path that a library cannot open at once."""
    open_named(path).close()


def is_special(path: Path) -> bool:
    """Whether a path leads to a pipe, a device or a socket."""
    return path.exists() and not (path.is_file() or path.is_dir())


def refuse_pipes(folder: Path, option: str) -> None:
    """Raise UserError for a pipe, a device or a socket in a folder."""
    # Libraries that read the folder would wait for it.
    for path in folder.iterdir():
        if is_special(path):
            raise UserError(
                f"{option} {folder}: {path.name} is a pipe, a device or a socket. Put a file there."
            )


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_files(folder: Path) -> None:
    """Flush every file below a folder."""
    for path in folder.rglob("*"):
        if path.is_file():
            flush(path)


@contextlib.contextmanager
def staged_file(path: Path) -> Iterator[Path]:
    """A path to write to, which replaces `path` at the end of the block.

    Readers see the old file or the new one. After a failure the partial file is deleted. If several
    processes write the same file, each has its own partial file, and the last one wins.
    """
    # Killed processes leave partial files: a later writer deletes those older than an hour.
    with contextlib.suppress(OSError):
        remove_stale(entry for entry in path.parent.iterdir() if is_partial(entry.name, path.name))
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}{PARTIAL}")
    try:
        yield partial
        # Before the rename: file systems may write the new name to disk before the content.
        flush(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def remove_stale(partial_files: Iterable[Path]) -> None:
    """Delete those of partial files that nobody has written to for an hour. Raises OSError."""
    oldest = time.time() - _STALE_SECONDS
    for path in partial_files:
        if path.stat().st_mtime < oldest:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def refusal_named(option: str, path: object) -> Iterator[None]:
    """Raise UserError if the block cannot write the path that an option names."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"--{option} {path} cannot be written ({error.strerror or error})."
        ) from error


def is_partial(name: str, of: str) -> bool:
    """Whether a name belongs to a partial file that `staged_file` makes for `of`."""
    return re.fullmatch(rf"\.{re.escape(of)}\.[0-9a-f]{{16}}{re.escape(PARTIAL)}", name) is not None


@contextlib.contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """An empty folder to fill, which becomes `target` at the end of the block.

    After a failure it is deleted.

    Args:
        target: a folder that does not exist or is empty.
    """
    staging = target.with_name(f"{target.name}.{os.getpid()}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        yield staging
        flush_files(staging)
        publish_folder(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def publish_folder(staging: Path, target: Path) -> None:
    """Rename a folder, whose files have been flushed, to its final name, durably."""
    # fsync in this order: the files (by the caller), then the entries of the folder, then the
    # rename, then the parent's entry. Otherwise a power cut may leave the final name with empty or
    # missing files (man 2 fsync).
    flush(staging)
    os.rename(staging, target)
    flush(target.parent)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a JSON file atomically. Secrets are removed from its content."""
    with staged_file(path) as partial:
        partial.write_text(json.dumps(redact_values(content), indent=2) + "\n")


def write_hashed_json(path: Path, content: Mapping[str, Any]) -> FileRecord:
    """Write and flush a JSON file of one line. Returns its size and hash."""
    text = json.dumps(content, allow_nan=False).encode()
    path.write_bytes(text)
    flush(path)
    return FileRecord(len(text), hashlib.sha256(text).hexdigest())


def read_json(path: Path) -> dict[str, Any]:
    """The content of a JSON file; empty if it does not exist or cannot be read."""
    try:
        content = json.loads(read_named(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def why_not_writable(folder: Path) -> str | None:
    """Explain why a folder, which need not exist yet, cannot be written to; None if it can.

    Creates nothing.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        return f"{existing} is a file"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} is not writable"
    return None


def cache_folder() -> Path:
    """The folder kept between runs: FSDP_QLORA_CACHE, or fsdp_qlora in the user's cache folder."""
    folder = os.environ.get("FSDP_QLORA_CACHE")
    if folder:
        return Path(folder)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fsdp_qlora"
    except RuntimeError as error:  # a user without a home, as in some containers
        raise UserError(
            "No cache folder: this user has no home. Set FSDP_QLORA_CACHE to a folder."
        ) from error


def bytes_of_variable(name: str) -> int:
    """The bytes that an environment variable gives in MiB, by default 128."""
    try:
        return int(float(os.environ.get(name, "128")) * 2**20)
    except (ValueError, OverflowError) as error:
        raise UserError(f"{name} is {os.environ[name]!r}. Give a number of MiB.") from error


# --- identifying a file's content without reading all of it ---


def fingerprint_files(files: Iterable[Path]) -> str:
    """A hash of the files' names, sizes, beginnings and samples of their content.

    Paths and times do not count: a copy on another machine has the same fingerprint. Training
    changes every weight, so the samples distinguish a base model from a further trained version of
    it.
    """
    digest = hashlib.sha256()
    for path in sorted(set(files), key=lambda path: path.name):
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        _hash_samples(digest, path, head_bytes=_HEAD_BYTES, samples=_SAMPLES)
    return digest.hexdigest()


def file_identity(path: Path, *, samples: int) -> list[object]:
    """Name, size and time (ns) of a safetensors file, and a hash of its header and samples.

    A replaced file has another time, or, if the time was preserved (cp -p, rsync), other samples.
    """
    real = path.resolve()
    status = real.stat()
    # In the hub's cache a file is a link to a blob whose name is a hash of its content.
    if real.parent.name == "blobs":
        return [path.name, status.st_size, real.name]
    with open_named(real) as file:
        header_bytes = 8 + int.from_bytes(file.read(8), "little")
    digest = hashlib.sha256()
    _hash_samples(digest, real, head_bytes=header_bytes, samples=samples)
    return [path.name, status.st_size, status.st_mtime_ns, digest.hexdigest()]


def _hash_samples(digest: Any, path: Path, *, head_bytes: int, samples: int) -> None:
    """Add a file's beginning and `samples` pages, evenly spread over it, to a hash."""
    last = max(path.stat().st_size - _SAMPLE_BYTES, 0)
    with open_named(path) as file:
        digest.update(file.read(head_bytes))
        for sample in range(samples):
            file.seek(sample * last // (samples - 1))
            digest.update(file.read(_SAMPLE_BYTES))


# --- folders of this machine and URLs ---
# Messages do not quote a refused value: it may contain a password.


PUBLIC = ":public"  # behind the name of a repository that everybody may read


def mirror_error(target: str) -> str | None:
    """Explain what is wrong with the value of --mirror; None if it can be used."""
    kind, _, rest = target.partition(":")
    if kind == "hf":
        if is_repository(rest.removeprefix("//").removesuffix(PUBLIC)):
            return None
        return "--mirror hf:OWNER/NAME needs a repository's name with its owner."
    if kind in _URLS and re.match("//[^/]", rest):
        return None
    return folder_error("mirror", target)


def is_repository(name: str) -> bool:
    """Whether a name has the form of a repository on the hub, OWNER/NAME."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None


def folder_error(option: str, text: str) -> str | None:
    """Explain why `text` is not a local folder's name, for an option's message; None if it is."""
    if ":" not in text.partition("/")[0]:
        return None
    urls = ", ".join(f"{kind}://" for kind in _URLS)
    return (
        f"--{option} must be a local folder (write a name with a colon as ./NAME). For copies in "
        f"another place use --mirror: {urls} or hf:OWNER/NAME (a repository on the hub)."
    )


def refuse_bad_folder(option: str, text: str) -> None:
    """Raise UserError if `text` is not the name of a local folder."""
    error = folder_error(option, text)
    if error:
        raise UserError(error)
