"""A sharded module with all of its weights, outside of its forward pass."""

import contextlib
from collections.abc import Iterator

from torch.distributed.fsdp import FSDPModule


@contextlib.contextmanager
def whole_weights(module: FSDPModule) -> Iterator[None]:
    """In this block of code a sharded module has all of its weights, on the device."""
    module.unshard()
    for part in module.modules():  # type: ignore[attr-defined]
        if bring := getattr(part, "bring_weights", None):  # of weight_stream.py
            bring()
    yield
    module.reshard()
