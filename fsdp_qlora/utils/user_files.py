"""Python files of users: run as modules, and what goes wrong in them in words."""

import hashlib
import sys
import traceback
from pathlib import Path
from types import ModuleType

from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import read_named

MEMORY_BYTES = 4 * 2**30
"""Besides what its process has when it is ready: a user's function that grows without end must not
take the memory of the training.
"""


def run_file(path: Path) -> tuple[ModuleType, str]:
    """Run a file as a module. Returns it, and the file's hash as records have it.

    Raises:
        UserError: the file cannot be read, or raises an error; the message names the line.
    """
    try:
        source = read_named(path)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}.") from error
    try:
        module = _run(source, path)
    # A file may also call sys.exit().
    except BaseException as error:
        line = line_in(path, error)
        raise UserError(f"{path}:{line} cannot be run: {reason(error)}") from error
    return module, f"(sha256 {hashlib.sha256(source).hexdigest()[:12]})"


def line_in(path: Path, error: BaseException) -> int:
    """The last line of the file itself, not one of a library that it calls; 0 if there is none."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(path)
    ]
    # A SyntaxError has no frame in the file.
    return getattr(error, "lineno", None) or [0, *lines][-1] or 0


def reason(error: BaseException) -> str:
    """An error in words."""
    if isinstance(error, MemoryError):
        return f"MemoryError: it takes more than {MEMORY_BYTES >> 30} GiB of memory"
    return f"{type(error).__name__}: {error}"


def _run(source: bytes, path: Path) -> ModuleType:
    # A file called json.py must not take the place of a library.
    name = path.stem
    while name in sys.modules or name in sys.stdlib_module_names:
        name += "_"
    # The file finds the modules beside it.
    sys.path.insert(0, str(path.absolute().parent))
    # Dataclasses and pickle look a class's module up there.
    module = ModuleType(name)
    sys.modules[name] = module
    module.__file__ = str(path)
    exec(compile(source, str(path), "exec"), vars(module))
    return module
