"""Processes of the stand-in's environment, forked from one that has imported torch and
transformers.

    python -m stand_in.forks SOCKET        # started by environment.py, ends with the process
    that started it

A connection is a process: a line of JSON says what is to run, lines with its process id and its
exit status come back.
"""

import atexit
import contextlib
import gc
import json
import os
import runpy
import socketserver
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import torch

# Whoever has asked CUDA for its devices can no longer be forked, and torch's compiler asks when it
# is imported.
with mock.patch.object(torch.cuda, "is_available", return_value=False):
    import datasets  # noqa: F401
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.optim
    import transformers.models.llama.modeling_llama
    import transformers.models.mixtral.modeling_mixtral  # noqa: F401

# bitsandbytes asks which of its libraries to load, and gets this answer without CUDA.
CARD = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "get_device_capability": lambda *_: (8, 6),
}
with mock.patch.multiple(torch.cuda, **CARD):
    import fsdp_qlora.run.train  # noqa: F401
assert not torch.cuda.is_initialized()

gc.collect()
gc.freeze()  # a process's collector would copy the pages of all that
gc.freeze = gc.unfreeze = lambda: None  # the training loop would undo it


class Handler(socketserver.StreamRequestHandler):
    """In a process of its own, which forks once more and waits, so that the status of a killed
    process is known too.
    """

    def handle(self) -> None:
        request = json.loads(self.rfile.readline())
        pid = os.fork()
        if not pid:
            become(**request)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(f"{pid}\n".encode())
            self.wfile.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())


class Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    max_children = 1000
    block_on_close = False
    request_queue_size = 64

    def __init__(self, path: str) -> None:
        super().__init__(path, Handler)
        self.parent = os.getppid()

    def service_actions(self) -> None:
        super().service_actions()
        if os.getppid() != self.parent:
            sys.exit()


def become(words: list[str], environment: dict[str, str], output: str) -> NoReturn:
    """Be a process that runs a script with its words, and end as Python would.

    Only the interpreter is not taken down: torch aborts where the thread of a backward pass is
    still freeing its graph.
    """
    status: Any = 1
    try:
        with open(output, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ.clear()
        os.environ |= environment
        sys.argv = words
        run_script()
        status = 0
    except SystemExit as end:
        status = end.code or 0
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_script() -> None:
    """The script that sys.argv names, or with -m the module."""
    import sitecustomize

    sitecustomize.start_as_asked()
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(sys.argv[0]).parent.resolve()))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    with Server(sys.argv[1]) as server:
        server.serve_forever(poll_interval=0.5)
