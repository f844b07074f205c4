"""GPUs by name: what the plan must know of one that is not in this machine."""

import difflib
from typing import NamedTuple

from fsdp_qlora.errors import UserError
from fsdp_qlora.output.text import GIB

# What torch's allocator never gets, until a card has measured it; sources are in docs/memory.md.
# The context and the kernels that a run calls, GiB by compute capability: what torch.OutOfMemoryError named beside
# torch in a process alone on its card, the most that was found. Nobody named it for 75 and 100: as 86 and 90.
_CONTEXT_GIB = {75: 0.41, 80: 0.40, 86: 0.41, 89: 0.50, 90: 0.73, 100: 0.73, 120: 0.58}
# NCCL's buffers of a connection and channel: 4 MiB (Simple), 4.7 (LL128) and 0.5 (LL); each channel has a ring and a
# tree. NVLink takes up to 32 channels, PCIe 4.
_NCCL_BYTES, _NCCL_CHANNELS = 2 * int(9.2 * 2**20), {True: 32, False: 4}
_CUBLAS_BYTES = 2 * (2**25 - 8_519_680)  # beyond what planning/memory.py counts, in torch's allocator


class Gpu(NamedTuple):
    """memory_gib: in all. bandwidth: of its memory, GB/s. tflops: dense products in 16 bits that add up in float32.
    link: GB/s at which ranks gather and the host sends, about. achieved: share of `tflops` in published runs.
    capability: for compute, such as 86. usable: share of its memory that CUDA can give; ECC takes a sixteenth.
    """

    name: str
    memory_gib: float
    bandwidth: float
    tflops: float
    link: float = 20.0
    achieved: float | None = None
    capability: int = 86
    usable: float = 0.98

    def beside_torch(self, num_gpus: int) -> dict[str, int]:
        """Bytes of the card that torch's allocator does not get, by what they are, with so many ranks."""
        channels = _NCCL_CHANNELS[self.link >= _NVLINK] if num_gpus > 1 else 0
        found = {
            "the driver and ECC": int((1 - self.usable) * self.memory_gib * GIB),
            "CUDA context and kernels": int(_CONTEXT_GIB[self.capability] * GIB),
            "NCCL's buffers": channels * _NCCL_BYTES,
            "cuBLAS on Hopper": _CUBLAS_BYTES * (self.capability == 90),
        }
        return {name: count for name, count in found.items() if count}


# PCIe 4.0 x16, PCIe 5.0 x16 and NVLink as programs see them; the published RTX 3090 had a slow slot.
_PCIE5, _NVLINK = 40.0, 150.0
# Memory, bandwidth and products: NVIDIA's data sheets and the whitepapers of GA102, AD102, GB202, GA100 and GH100.
# Achieved: benchmarks/published_runs.py. GeForce cards add up in float32 at half of their rate for float16.
_TABLE = [
    Gpu("RTX 3060 12GB", 12, 360, 25.6),
    Gpu("RTX 3080 10GB", 10, 760, 59.5),
    Gpu("RTX 3090", 24, 936, 71.0, 2.8, 0.81),
    Gpu("RTX 3090 Ti", 24, 1008, 80.0),
    Gpu("RTX 4060 Ti 16GB", 16, 288, 44.1, capability=89),
    Gpu("RTX 4070 Ti SUPER", 16, 672, 88.2, capability=89),
    Gpu("RTX 4080", 16, 717, 97.5, capability=89),
    Gpu("RTX 4090", 24, 1008, 165.2, 20.0, 0.78, capability=89),
    Gpu("RTX 5080", 16, 960, 112.6, _PCIE5, capability=120),
    Gpu("RTX 5090", 32, 1792, 209.5, _PCIE5, capability=120),
    Gpu("RTX A4000", 16, 448, 76.7),
    Gpu("RTX A5000", 24, 768, 111.1, 20.0, 0.49),
    Gpu("RTX A6000", 48, 768, 154.8),
    Gpu("RTX 6000 Ada", 48, 960, 364.2, 20.0, 0.25, capability=89),
    Gpu("RTX PRO 6000 Blackwell", 96, 1792, 503.8, _PCIE5, capability=120),
    Gpu("T4", 16, 320, 65.0, 10.0, capability=75, usable=0.92),
    Gpu("L4", 24, 300, 121.0, capability=89, usable=0.92),
    Gpu("A10G", 24, 600, 70.0, usable=0.92),
    Gpu("A40", 48, 696, 149.7, usable=0.92),
    Gpu("L40S", 48, 864, 362.0, capability=89, usable=0.92),
    Gpu("A100 40GB", 40, 1555, 312.0, _NVLINK, 0.66, capability=80, usable=0.99),
    Gpu("A100 80GB", 80, 2039, 312.0, _NVLINK, 0.66, capability=80, usable=0.99),
    Gpu("H100 PCIe", 80, 2000, 756.0, _PCIE5, capability=90, usable=0.99),
    Gpu("H100 SXM", 80, 3350, 989.0, _NVLINK, 0.39, capability=90, usable=0.99),
    Gpu("H200", 141, 4800, 989.0, _NVLINK, 0.39, capability=90, usable=0.99),
    Gpu("B200", 180, 8000, 2250.0, _NVLINK, capability=100, usable=0.99),
]
GPUS = {gpu.name: gpu for gpu in _TABLE}
ACHIEVED = 0.5  # where no run of such a GPU is published: the middle of those that are


def find_gpu(name: str) -> Gpu:
    """The GPU of a name as people write it: rtx3090, "NVIDIA GeForce RTX 3090", H100.

    Raises:
        UserError: none has it, or several; with the nearest names.
    """
    wanted = _plain(name)
    if exact := [gpu for gpu in _TABLE if _plain(gpu.name) == wanted]:
        return exact[0]
    found = [gpu for gpu in _TABLE if wanted and wanted in _plain(gpu.name)]
    if len({gpu.memory_gib for gpu in found}) == 1:
        return found[0]
    names = [gpu.name for gpu in found] or difflib.get_close_matches(name.upper(), GPUS, n=3, cutoff=0.3) or list(GPUS)
    raise UserError(f"--gpu {name}: no single GPU has this name. Try {', '.join(names)}, or give --gpu_memory_gib.")


def gpu_like(name: str, memory_gib: float) -> Gpu:
    """A GPU with so much memory, and the rates of the one of that name, or of a usual one if that is not known."""
    known = next((gpu for gpu in _TABLE if _plain(gpu.name) == _plain(name)), None)
    gpu = known or GPUS["RTX 3090"]._replace(name="a GPU like an RTX 3090")
    return gpu._replace(memory_gib=memory_gib)


def _plain(name: str) -> str:
    """Lower case, without spaces and what vendors put before it."""
    text = name.lower()
    for word in ("nvidia", "geforce", "rtx", "tesla", " ", "-", "_"):
        text = text.replace(word, "")
    return text
