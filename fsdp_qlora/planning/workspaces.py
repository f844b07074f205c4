"""Memory in which cuBLAS works, which torch allocates for each thread and stream that calls it."""

import os
import re

# Bytes by default, by compute capability; torch 2.11 on the stand-in for CUDA.
_BYTES = {90: 2**25}
WORKSPACE = 8_519_680
"""Bytes of a workspace where the compute capability is not known; as of most."""


def workspace_bytes(capability: int) -> int:
    """Bytes of a workspace on a GPU of a compute capability, such as 90 for 9.0."""
    # The sizes in KiB and numbers of parts, as torch reads them: --deterministic sets some.
    setting = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    parts = re.findall(r":(\d+):(\d+)", setting)
    if parts:
        return sum(1024 * int(size) * int(number) for size, number in parts)
    return _BYTES.get(capability, WORKSPACE)
