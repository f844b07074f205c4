"""The command `plan`: its options, and the GPUs and the run that they describe."""

import argparse
import dataclasses
import json

from fsdp_qlora.commands.run_config import parse_train_config
from fsdp_qlora.config.marks import PLANNABLE
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.distributed.supervision.launch import importing
from fsdp_qlora.planning.gpus import Gpu, find_gpu, nearest_gpu
from fsdp_qlora.utils.errors import UserError

_SILENT_SECONDS = 2  # before a progress bar is shown
_ROWS_PER_STEP = ("__batch_size", "__gradient_accumulation_steps")  # options, with _ for -


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", metavar="NAME", help='GPU model, such as "RTX 3090" or H100')
    parser.add_argument(
        "--gpu_memory_gib",
        type=float,
        metavar="GIB",
        help="memory per GPU, for a GPU that plan does not know by name",
    )
    parser.add_argument(
        "--num_gpus", type=int, metavar="N", help="number of GPUs of one machine (default: 1)"
    )
    parser.add_argument(
        "--host_ram_gib", type=float, metavar="GIB", help="host memory of the machine"
    )
    parser.add_argument(
        "--million_tokens",
        type=float,
        help="millions of tokens to train on, in all epochs (default: the dataset's, or 10)",
    )
    parser.add_argument(
        "--price_per_hour", type=float, metavar="USD", help="hourly price of all GPUs together"
    )
    parser.add_argument(
        "--explain", action="store_true", help="list the ten largest allocations at the peak"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Plan a run on GPUs that may be elsewhere: whether it fits, with which settings, how fast and
    for how much money. It takes the options of training; --model_name may be a folder, a
    config.json, a well-known name such as llama-2-70b, or a model on the hub. --auto finds the
    fastest settings, with the same rows per step if they are given. Memory is counted from the
    model without weights, for the longest rows of --dataset or, without it, the longest rows that
    the options allow. Speed is estimated from published runs of other programs. The exit status is
    1 if nothing fits.
    """
    config = parse_train_config([*args.training_options, "--dry_run", "true"])
    searches = config.auto
    config = dataclasses.replace(config, auto=False)
    for name in ("gpu_memory_gib", "num_gpus", "host_ram_gib", "million_tokens", "price_per_hour"):
        value = getattr(args, name)
        if not PLANNABLE.accepts(value):
            raise UserError(f"--{name} must be {PLANNABLE.allowed}, but is {value}.")
    tokens = args.million_tokens and args.million_tokens * 1e6
    gpu = _gpu(args)
    # Imported here, so that --help and wrong options answer at once.
    with importing():
        from tqdm import tqdm

        from fsdp_qlora.planning.offers.describe import (
            Offer,
            as_json,
            describe,
            describe_fastest,
        )
        from fsdp_qlora.planning.offers.planner import make_planner, plan_teacher_pass
        from fsdp_qlora.planning.search import GpuSet

    gpus = GpuSet(gpu, args.num_gpus or 1, args.host_ram_gib)
    planner = make_planner(config, gpus, tokens)
    offer = Offer(planner, args.price_per_hour)
    with tqdm(
        desc="Measuring blocks",
        unit=" operators",
        mininterval=1,
        leave=False,
        delay=_SILENT_SECONDS,
    ) as bar:
        planner.on_operator = bar.update
        planned = (
            planner.fastest(keeps_rows=_keeps_rows(args, config))
            if searches
            else [planner.as_asked()]
        )
    if args.json:
        plans = [as_json(offer, run_plan) for run_plan in planned[:3]]
        print(json.dumps(plans if searches else plans[0], indent=1))
    else:
        teacher = plan_teacher_pass(planned[0])
        print("\n".join(describe(offer, planned[0], teacher, explain=args.explain)))
        if searches:
            print("\n".join(describe_fastest(offer, planned)))
    return 0 if planned[0].fits else 1


def _keeps_rows(args: argparse.Namespace, config: TrainConfig) -> bool:
    """Whether the rows per step are asked for."""
    is_given = any(
        word.replace("-", "_").startswith(_ROWS_PER_STEP) for word in args.training_options
    )
    return is_given or config.batch_size * config.gradient_accumulation_steps > 1


def _gpu(args: argparse.Namespace) -> Gpu:
    """The GPU with the given name.

    --gpu_memory_gib alone takes the rates of a usual GPU of that size.
    """
    if not (args.gpu or args.gpu_memory_gib):
        raise UserError('Give --gpu NAME, such as --gpu "RTX 3090", or --gpu_memory_gib.')
    gpu = find_gpu(args.gpu) if args.gpu else nearest_gpu(args.gpu_memory_gib)
    return gpu._replace(memory_gib=args.gpu_memory_gib) if args.gpu_memory_gib else gpu
