"""Python imports this by itself where its folder is on PYTHONPATH.

With PHANTOM_SUMMARY set, the whole process is recorded, and at its end its counts are written there
as JSON ("{rank}" in the name becomes the rank). With PHANTOM_VALUES=1 its operators are computed
(values/process.py).
"""

import atexit
import importlib.abc
import importlib.machinery
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def _record(path: Path) -> None:
    from stand_in import counts

    process = os.getpid()
    counts.start()

    def write() -> None:
        if os.getpid() != process:  # a forked child
            return
        path.write_text(json.dumps(counts.stop().summary(), indent=1))

    atexit.register(write)


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Compute from the moment on that torch is imported, which programs do after they have set its
    variables.
    """

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_install(module: ModuleType) -> None:
            execute(module)
            _install_values()

        spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec


def _install_values() -> None:
    from stand_in.values.process import install

    install()


def start_as_asked() -> None:
    """Do what the environment asks for."""
    if "PHANTOM_SUMMARY" in os.environ and "RANK" in os.environ:
        _record(Path(os.environ["PHANTOM_SUMMARY"].format(rank=os.environ["RANK"])))
    if os.environ.get("PHANTOM_VALUES") == "1":
        if "torch" in sys.modules:
            _install_values()
        else:
            sys.meta_path.insert(0, _AfterTorch())


start_as_asked()
