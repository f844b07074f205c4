"""The adapters of a service that a server has, and the folders from which it reads them."""

import contextlib
import hashlib
import shutil
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fsdp_qlora.model.adapters.peft_folder import WEIGHTS
from fsdp_qlora.training.rl.client import Server
from fsdp_qlora.utils.files import record_of

# Adapters besides those in use; others are copied and loaded again.
_KEPT = 8


class LoadedAdapter(NamedTuple):
    """An adapter that a server has.

    load: has it loaded again, where the server has lost it.
    """

    name: str
    load: Callable[[], None]


@dataclass
class _Copy:
    """A folder that the server reads."""

    folder: Path
    num_users: int = 0
    is_loaded: bool = False


class ServedAdapters:
    """Has a server load saved weights, each under a name of its own.

    Its methods may be called in any thread.

    Args:
        copy_adapter: copies saved weights, in the form that the server reads.
        folder: of the copies; those of an earlier start are deleted.
    """

    def __init__(
        self, server: Server, copy_adapter: Callable[[Path, Path], object], folder: Path
    ) -> None:
        self._server = server
        self._copy_adapter = copy_adapter
        self._folder = folder
        # Of this folder's service alone: several may share a server.
        digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()
        self._prefix = f"service-{digest[:8]}-"
        self._copies: OrderedDict[str, _Copy] = OrderedDict()
        self._lock = threading.Lock()
        shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def using(self, weights: Path, saved_by: str) -> Iterator[LoadedAdapter]:
        """Have saved weights loaded, which stay so while the block runs.

        Args:
            saved_by: the request that has saved them.
        Raises:
            RolloutError: the server does not load them. OSError: they cannot be copied.
        """
        copy = self._take(weights, saved_by)
        try:
            load = partial(self._load, copy)
            if not copy.is_loaded:
                self._server.patiently(load)
            yield LoadedAdapter(copy.folder.name, load)
        finally:
            with self._lock:
                copy.num_users -= 1

    def _take(self, weights: Path, saved_by: str) -> _Copy:
        """The copy of saved weights, for one user more."""
        with self._lock:
            if saved_by not in self._copies:
                self._copies[saved_by] = self._copied(weights, saved_by)
            copy = self._copies[saved_by]
            copy.num_users += 1
            self._copies.move_to_end(saved_by)
            unused = [key for key, each in self._copies.items() if not each.num_users]
            for key in unused[: max(0, len(self._copies) - _KEPT)]:
                shutil.rmtree(self._copies.pop(key).folder, ignore_errors=True)
            return copy

    def _copied(self, weights: Path, saved_by: str) -> _Copy:
        # With the hash, so that a server cannot answer by other weights of this name, such as those
        # that a request has saved again after a kill.
        content = f"{saved_by} {record_of(weights / WEIGHTS).sha256}"
        digest = hashlib.sha256(content.encode()).hexdigest()
        folder = self._folder / f"{self._prefix}{digest[:16]}"
        self._copy_adapter(weights, folder)
        return _Copy(folder)

    def _load(self, copy: _Copy) -> None:
        """Have a copy loaded. Raises RequestFailed or RolloutError."""
        self._server.load(copy.folder.name, copy.folder, self._is_old)
        copy.is_loaded = True

    def _is_old(self, name: str) -> bool:
        """Whether an adapter of the server is this service's, and not needed any more."""
        with self._lock:
            needed = {copy.folder.name for copy in self._copies.values()}
        return name.startswith(self._prefix) and name not in needed
