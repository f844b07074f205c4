"""DoRA against plain LoRA on one linear layer, and PEFT's versions for comparison: `python benchmarks/dora.py`.

One process on the CPU, fp32. The layers take turns on the same input, a forward and a backward pass each:

- lora, dora: the package's layers on its 4-bit layer (NF4, double quantization);
- peft lora, peft dora: PEFT's on bitsandbytes' Linear4bit, which decodes in bf16.

Peak memory is counted by the profiler from the first tensor of the forward pass to the end of the backward pass,
without the tensors alive before (weights, input). Exits with 1 if dora takes more than 1.15 times lora's time (median
of the ratios of neighbouring steps), or if its peak exceeds lora's by a decoded weight or more.
"""

import argparse
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

# So that it runs from a clone that is not installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import bitsandbytes as bnb
import peft
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from benchmarks.common import describe_machine, peak_bytes, seconds_of, write_results
from fsdp_qlora.adapters.dora import DoraLinear
from fsdp_qlora.adapters.lora import LoraLinear
from fsdp_qlora.quantizers.bnb_4bit import Bnb4bitLinear
from fsdp_qlora.ranks import distributed

MAX_RATIO = 1.15
RANKS = distributed.Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="measured steps of each layer")
    parser.add_argument("--in_features", type=int, default=2048)
    parser.add_argument("--out_features", type=int, default=5632)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; 1 is the steadiest")
    parser.add_argument("--output", default="", help="JSON file to write")
    return parser.parse_args(argv)


def quantized_linear(linear: nn.Linear, mesh: DeviceMesh) -> Bnb4bitLinear:
    """The package's 4-bit layer, gathered from its single shard."""
    layer = Bnb4bitLinear(linear, quant_type="nf4", double_quant=True, compute_dtype=torch.float32)
    layer.to_empty(device="cpu")
    for name, parameter in list(layer.named_parameters()):
        sharded = distribute_tensor(parameter.data, mesh, [Shard(0)])
        setattr(layer, name, nn.Parameter(sharded, requires_grad=False))
    layer.load_shard(linear.weight.detach().flatten(), mesh)
    for name, parameter in list(layer.named_parameters()):
        assert isinstance(parameter.data, DTensor)
        setattr(layer, name, nn.Parameter(parameter.data.to_local(), requires_grad=False))
    return layer


def our_layer(kind: type[LoraLinear | DoraLinear], base: Bnb4bitLinear, rank: int) -> nn.Module:
    layer = kind(base, rank=rank, scaling=2.0, dropout=0.0)
    layer.lora.to_empty(device="cpu")
    nn.init.normal_(layer.lora.lora_A.weight, std=0.02)
    nn.init.normal_(layer.lora.lora_B.weight, std=0.02)
    if isinstance(layer, DoraLinear):
        squares = layer.base_row_squares()
        with torch.no_grad():
            layer.lora.magnitude.row_squares.copy_(squares)
            layer.lora.magnitude.weight.copy_(squares.sqrt())
    return layer


def peft_layer(linear: nn.Linear, rank: int, *, use_dora: bool) -> nn.Module:
    base = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=torch.float32)
    base.weight = bnb.nn.Params4bit(linear.weight.detach().clone(), requires_grad=False, quant_type="nf4")
    model = nn.Sequential(base.to("cpu"))
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["0"], use_dora=use_dora)
    return peft.get_peft_model(model, config)


def step(layer: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> None:
    layer(x).backward(grad)
    x.grad = None
    layer.zero_grad()


def run_benchmark(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    distributed.start_process_group(RANKS)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
        linear = nn.Linear(args.in_features, args.out_features, bias=False)
        base = quantized_linear(linear, mesh)
    finally:
        distributed.stop_process_group()
    x = torch.randn(1, args.tokens, args.in_features, requires_grad=True)
    grad = torch.randn(1, args.tokens, args.out_features)
    layers = {
        "lora": our_layer(LoraLinear, base, args.rank),
        "dora": our_layer(DoraLinear, base, args.rank),
        "peft lora": peft_layer(linear, args.rank, use_dora=False),
        "peft dora": peft_layer(linear, args.rank, use_dora=True),
    }
    work: dict[str, Callable[[], None]] = {
        name: lambda layer=layer: step(layer, x, grad)  # type: ignore[misc]
        for name, layer in layers.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(2 + args.steps):
        for name, run in work.items():
            wall, cpu = seconds_of(run)
            if turn >= 2:  # the first ones warm up
                seconds[name].append(wall)
                cpu_seconds[name].append(cpu)
    table = {
        name: {
            "median_seconds": statistics.median(times),
            "fastest_seconds": min(times),
            "paired_ratio": statistics.median(a / b for a, b in zip(times, seconds["lora"], strict=True)),
            "cpu_ratio": statistics.median(cpu_seconds[name]) / statistics.median(cpu_seconds["lora"]),
            "peak_bytes": peak_bytes(work[name]),
        }
        for name, times in seconds.items()
    }
    return {
        "machine": describe_machine(torch.device("cpu")),
        "options": {name: value for name, value in vars(args).items() if name != "output"},
        "ratio": table["dora"]["paired_ratio"],
        "decoded_weight_bytes": linear.weight.nbytes,
        "extra_peak_bytes": table["dora"]["peak_bytes"] - table["lora"]["peak_bytes"],
        "layers": table,
    }


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    warnings.simplefilter("ignore")
    result = run_benchmark(args)
    print(f"{'':12}{'median ms':>10}{'fastest':>9}{'to lora':>9}{'CPU ratio':>11}{'peak MiB':>10}")
    for name, row in result["layers"].items():
        print(
            f"{name:12}{1e3 * row['median_seconds']:10.1f}{1e3 * row['fastest_seconds']:9.1f}"
            f"{row['paired_ratio']:9.3f}{row['cpu_ratio']:11.3f}{row['peak_bytes'] / 2**20:10.1f}"
        )
    print(f"A decoded weight is {result['decoded_weight_bytes'] / 2**20:.1f} MiB.")
    if args.output:
        write_results(args.output, " ".join(["python benchmarks/dora.py", *argv]), result)
    failed = False
    if result["ratio"] > MAX_RATIO:
        print(f"FAILED: dora takes {result['ratio']:.3f} times lora's step, allowed {MAX_RATIO}.")
        failed = True
    if result["extra_peak_bytes"] >= result["decoded_weight_bytes"]:
        print("FAILED: dora's peak is a decoded weight above lora's.")
        failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
