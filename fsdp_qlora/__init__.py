"""Fine-tune large language models on small GPUs: `from fsdp_qlora import train`.

The names below are loaded when they are used, so that `import fsdp_qlora` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_qlora.api import TrainResult, train
    from fsdp_qlora.config.options import TrainConfig
    from fsdp_qlora.utils.errors import RunStopped, TrainingError, UserError

__version__ = "0.1.0"  # pyproject.toml reads it here
__all__ = [
    "RunStopped",
    "TrainConfig",
    "TrainResult",
    "TrainingError",
    "UserError",
    "__version__",
    "train",
]

# torch takes seconds to import, so a script that only needs the version does not load it.
_MODULES = {
    "train": "api",
    "TrainResult": "api",
    "TrainConfig": "config.options",
    "RunStopped": "utils.errors",
    "TrainingError": "utils.errors",
    "UserError": "utils.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
