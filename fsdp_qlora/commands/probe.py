"""Measures the rates of this machine's GPUs that a plan takes from a table otherwise: `plan --probe`."""

import json
import statistics
import sys
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.benchmark import Timer

from fsdp_qlora.commands.doctor import joined_ranks, run_ranks
from fsdp_qlora.distributed.device import configure_kernels, gpu_problem
from fsdp_qlora.model.architecture.precision import PRECISIONS, choose_precision
from fsdp_qlora.model.quantizers.bnb_4bit import Bnb4bitLinear
from fsdp_qlora.planning.gpus import Gpu, gpu_of
from fsdp_qlora.planning.speed import DECODED_BYTES, MEMORY_SHARE
from fsdp_qlora.utils.errors import UserError


def probe_gpus(asked: int | None) -> tuple[int, Gpu, dict[str, float]]:
    """The number of GPUs that is asked for, else of those here, the first one, and the slowest's rates while all work.

    Raises UserError if there is none, or they do not answer in time.
    """
    if not torch.cuda.is_available():
        raise UserError(gpu_problem() or "--probe: no GPU is visible here. Leave it out, and name one with --gpu.")
    here = torch.cuda.device_count()
    said, problem = run_ranks(__name__, "cuda", min(asked or here, here))
    if problem:
        raise UserError(f"--probe: {problem}. `fsdp-qlora doctor` looks for the reason.")
    ranks = [json.loads(text.splitlines()[-1]) for text in said]
    slowest = {name: min(rank[name] for rank in ranks) for name in ranks[0]}
    return asked or here, gpu_of(torch.cuda.get_device_properties(0)), slowest


def with_rates(gpu: Gpu, rates: Mapping[str, float]) -> Gpu:
    """A GPU with measured rates: shares of its peaks, of which a plan would take shares."""
    bandwidth, host_link = rates["decoding_gb_s"] / MEMORY_SHARE, rates["from_host_gb_s"]
    rated = gpu._replace(tflops=rates["product_tflops"], achieved=1.0, bandwidth=bandwidth, host_link=host_link)
    return rated._replace(link=rates.get("gather_gb_s", host_link))


def measure(
    device: torch.device, *, shape: tuple[int, int, int] = (4096, 8192, 28672), copied: int = 2**28
) -> dict[str, float]:
    """The rates of a rank; products are of 16 bits, on a CPU of 32, and of a gather the bytes count that it receives.

    shape: tokens, and the sizes of a decoder block's largest matrix. copied: bytes, also what each rank gathers.
    """
    (tokens, hidden, wide), world_size = shape, dist.get_world_size()
    dtype = PRECISIONS[choose_precision("auto", device)].compute_dtype
    linear = nn.Linear(hidden, wide, bias=False, device="meta")
    quantized = Bnb4bitLinear(linear, quant_type="nf4", double_quant=True, compute_dtype=dtype).to_empty(device=device)
    x, weight = (torch.randn(rows, hidden, dtype=dtype, device=device) for rows in (tokens, wide))
    here = torch.zeros(copied, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there, gathered = (torch.zeros(count * copied, dtype=torch.uint8, device=device) for count in (1, world_size))
    one_half, other_half = here.view(2, -1)
    work: dict[str, tuple[float, Callable[[], object]]] = {
        "product_tflops": (2 * tokens * hidden * wide / 1e12, lambda: x @ weight.T),
        "decoding_gb_s": (DECODED_BYTES * hidden * wide / 1e9, quantized.dequantize),
        "gather_gb_s": ((world_size - 1) * copied / 1e9, lambda: dist.all_gather_into_tensor(gathered, there)),
        # After a gather all ranks copy at the same time: GPUs may share their way to the host.
        "from_host_gb_s": (copied / 1e9, lambda: there.copy_(here, non_blocking=True)),
        "to_host_gb_s": (copied / 1e9, lambda: here.copy_(there, non_blocking=True)),
        "host_memory_gb_s": (copied / 1e9, lambda: one_half.copy_(other_half)),  # half is read, half written
    }
    return {name: amount / _seconds(call) for name, (amount, call) in work.items() if amount}


def _seconds(call: Callable[[], object]) -> float:
    """The median time of a call by torch's timer, which warms up and waits for the GPU; as often on every rank."""
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return statistics.median(timer.timeit(4).median for _ in range(5))


if __name__ == "__main__":
    with joined_ranks(*sys.argv[1:]) as rank_device:
        configure_kernels()
        print(json.dumps(measure(rank_device)))
