"""GPUs by name: what the plan must know of one that is not in this machine."""

import difflib
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fsdp_qlora.distributed.layout import Layout
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.text import GIB

# Host memory of a rank's process without tensors, resident in a tiny model's run: Python, torch,
# transformers; 438 MiB on a CPU, 457 on the stand-in for CUDA, of which 114 and 139 are pages of
# files that the ranks share.
PROCESS = 450 * 2**20
# Memory that torch's allocator never gets, until a card has measured it; sources are in
# docs/memory.md. The context and the kernels that a run calls, GiB by compute capability: what
# torch.OutOfMemoryError named beside torch in a process alone on its card, the most that was found.
# Nobody named it for 75, 100 and 121: as 86, 90 and 120.
_CONTEXT_GIB = {75: 0.41, 80: 0.40, 86: 0.41, 89: 0.50, 90: 0.73, 100: 0.73, 120: 0.58, 121: 0.58}
# NCCL's buffers of a connection and channel: 4 MiB (Simple), 4.7 (LL128) and 0.5 (LL), sent and
# received ones in pieces of 2 MiB. By NVLink: channels of a communicator, each with a ring and a
# tree, and of two ranks that exchange tokens.
_NCCL_BYTES = 12 * 2**20
_NCCL_CHANNELS = {True: 32, False: 4}
_P2P_CHANNELS = {True: 32, False: 2}
# With NVSwitch also multicast buffers (NVLS) for each GPU of the machine, by compute capability: 16
# channels, 24 on Blackwell, of 2 MiB (NCCL 2.29.7, src/transport/nvls.cc).
_NVLS_BYTES = {90: 16 * 2**21, 100: 24 * 2**21}
_NVLINK = 64.0  # GB/s, at least: PCIe 5.0 x16 has less


class Gpu(NamedTuple):
    """A row of gpus.yaml, which says what each column is and where it is from."""

    name: str
    memory_gib: float
    bandwidth: float
    tflops: float
    link: float = 20.0
    achieved: float | None = None
    capability: int = 86
    usable: float = 0.98
    to_host: float | None = None
    shared: bool = False

    @property
    def host_link(self) -> float:
        """GB/s between GPU and host, in each direction."""
        if self.to_host:
            return self.to_host
        if self.link < _NVLINK:
            return self.link
        # PCIe 4.0 x16, or 5.0 from Hopper on
        return 40.0 if self.capability >= 90 else 20.0

    def beside_torch(self, layout: Layout) -> dict[str, int]:
        """Bytes of the GPU that torch's allocator does not get, by what they are."""
        is_linked = self.link >= _NVLINK
        groups = layout.communicators
        # a ring and a tree for each channel
        channels = len(groups) * 2 * _NCCL_CHANNELS[is_linked]
        peers = sum(size - 1 for size, exchanges in groups if exchanges)
        channels += peers * min(layout.p2p_channels, _P2P_CHANNELS[is_linked])
        multicast = sum(size for size, _ in groups if size > 1) if is_linked else 0
        sizes_by_use = {
            "the driver and ECC": int((1 - self.usable) * self.memory_gib * GIB),
            "CUDA context and kernels": int(_CONTEXT_GIB[self.capability] * GIB),
            "NCCL's buffers": channels * _NCCL_BYTES,
            "NCCL's multicast buffers": multicast * _NVLS_BYTES.get(self.capability, 0),
        }
        if self.shared:
            # What else is in the host's memory, of which a tenth is left to the system.
            sizes_by_use["the system and cached files"] = int(0.1 * self.memory_gib * GIB)
            sizes_by_use["the run's process"] = PROCESS
        return {name: count for name, count in sizes_by_use.items() if count}


_ROWS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
GPUS = {name: Gpu(name, **row) for name, row in _ROWS.items()}
ACHIEVED = 0.5  # where no run of such a GPU is published: about the middle of those that are


def find_gpu(name: str) -> Gpu:
    """The GPU of a name as people write it: rtx3090, "NVIDIA GeForce RTX 3090", H100.

    Raises:
        UserError: none has it, or several; with the nearest names.
    """
    plain = _plain(name)
    exact = [gpu for gpu in GPUS.values() if _plain(gpu.name) == plain]
    if exact:
        return exact[0]
    named = [gpu for gpu in GPUS.values() if plain and plain in _plain(gpu.name)]
    # Variants with the same memory differ in speed alone, and the first is a guess at that; with
    # other memory a plan would be wrong.
    if len({gpu.memory_gib for gpu in named}) == 1:
        return named[0]
    names = [gpu.name for gpu in named]
    if not names:
        names = difflib.get_close_matches(name.upper(), GPUS, n=3, cutoff=0.3) or list(GPUS)
    raise UserError(
        f"--gpu {name}: no single GPU has this name. Try {', '.join(names)}, or give "
        "--gpu_memory_gib."
    )


def nearest_gpu(memory_gib: float, name: str = "", capability: int = 0) -> Gpu:
    """A GPU with this memory, and the rates of the named one, else of the nearest one as new."""
    named = next((gpu for gpu in GPUS.values() if _plain(gpu.name) == _plain(name)), None)
    if named:
        return named._replace(memory_gib=memory_gib)
    as_new = [gpu for gpu in GPUS.values() if gpu.capability == capability] or [GPUS["RTX 3090"]]
    nearest = min(as_new, key=lambda gpu: abs(gpu.memory_gib - memory_gib))
    return nearest._replace(name=f"a GPU like an {nearest.name}", memory_gib=memory_gib)


def gpu_of(card: Any) -> Gpu:
    """The GPU that torch.cuda.get_device_properties describes."""
    capability = 10 * card.major + card.minor
    gpu = nearest_gpu(card.total_memory / GIB, card.name, capability)
    # The driver's and ECC's share is not in total_memory.
    return gpu._replace(usable=1.0)


def _plain(name: str) -> str:
    """Lower case, without spaces and what vendors put before it."""
    return re.sub("nvidia|geforce|rtx|tesla|[ _-]", "", name.lower())
