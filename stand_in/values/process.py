"""Values for a whole process, in all its threads: startup/sitecustomize.py calls `install` with
PHANTOM_VALUES=1.
"""

import atexit
import ctypes
import json
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch

from stand_in.values.generators import drawing_in_graphs
from stand_in.values.mode import Values
from stand_in.values.ways import IS_POISONED, library, noted


def install() -> None:
    """Compute from here on, and report at the end of the process what was not computed."""
    start_with_threads()
    draw_in_graphs()
    if os.environ.get("PHANTOM_STRAYS") == "trace":
        library().phantom_on_stray(_trace_stray)
    if IS_POISONED:
        poison_resized_storages()
    atexit.register(report, os.getpid())
    Values().__enter__()


def start_with_threads() -> None:
    """Modes are of a thread. autograd's threads take on that of their pass, those of Python begin
    with it here.
    """
    begin: Any = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def begin_with_values(self: threading.Thread) -> None:
        with Values():
            begin(self)

    threading.Thread._bootstrap_inner = begin_with_values  # type: ignore[attr-defined]


def draw_in_graphs() -> None:
    """A launch does not say where its draws begin: the replay that contains it does."""
    replay = torch.cuda.CUDAGraph.replay

    def replay_and_draw(self: torch.cuda.CUDAGraph) -> None:
        with drawing_in_graphs():
            replay(self)

    torch.cuda.CUDAGraph.replay = replay_and_draw  # type: ignore[method-assign]


def poison_resized_storages() -> None:
    """FSDP2 gets memory without an operator: it empties storages and makes them large again."""
    resize = torch.UntypedStorage.resize_

    def resize_and_poison(self: torch.UntypedStorage, size: int) -> Any:
        before = self.nbytes()
        result = resize(self, size)
        if self.device.type == "cuda" and not before and size:
            ctypes.memset(self.data_ptr(), 0xFF, size)  # NaN in every float
        return result

    torch.UntypedStorage.resize_ = resize_and_poison  # type: ignore[method-assign]


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)
def _trace_stray(name: bytes) -> None:
    print(f"phantom: stray kernel {name.decode()[:100]}", file=sys.stderr)
    traceback.print_stack(limit=12)


def strays() -> dict[str, int]:
    """Kernels that were launched where no one computes, and how often."""
    runtime = library()
    times = ctypes.c_long()
    found = {}
    runtime.phantom_stray.restype = ctypes.c_char_p
    while (name := runtime.phantom_stray(len(found), ctypes.byref(times))) is not None:
        found[name.decode()] = times.value
    return found


def report(process: int) -> None:
    """Say what is missing: to the file that PHANTOM_VALUES_REPORT names, else a line if there is
    something.
    """
    if os.getpid() != process:  # a forked child
        return
    path = os.environ.get("PHANTOM_VALUES_REPORT")
    found = strays()
    if path:
        file = Path(path.replace("{rank}", os.environ.get("RANK", "0")))
        file.write_text(json.dumps({"strays": found, "noted": noted}, indent=1))
    elif found:
        print(f"phantom: not computed: {found}", file=sys.stderr)
