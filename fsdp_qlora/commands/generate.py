"""The command `generate`: answers of a model to a prompt, to a file of prompts, or in a chat."""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_qlora.commands.run_config import adapter_folder, trained_model_options
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.distributed.supervision.launch import relaunch_if_needed, set_torch_variables
from fsdp_qlora.utils.errors import UserError


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--adapter", metavar="DIR", help="adapter, run or model, or a name on the hub; else the base")
    parser.add_argument("--prompt", metavar="TEXT", help="one question; the answer goes to stdout as it comes")
    parser.add_argument("--prompts", metavar="FILE", help="file of questions, .jsonl or one in each line")
    parser.add_argument("--out", metavar="FILE", help="file for the answers to --prompts, .jsonl")
    parser.add_argument("--system", metavar="TEXT", default="", help="system prompt")
    parser.add_argument("--max_new_tokens", type=int, default=256, metavar="N", help="of an answer (default: 256)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (default): the likeliest token")
    parser.add_argument(
        "--top_p", type=float, default=1.0, metavar="P", help="draw from the likeliest with this share (default: 1)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (default: 0)")


def run(args: argparse.Namespace) -> int | None:
    """Generate text with a base and its adapter, in the precision and on the cards of the training: sharded, offloaded
    as they were, one process per GPU, or on a CPU. Prompts get the format of the training. Without --prompt and
    --prompts it is a chat. The base and how it was stored are read from the adapter's folder; every option of training
    may be given too, such as --model_name, --nproc_per_node, --use_cpu_offload, --prompt_template and --batch_size
    (prompts per process at a time).
    """
    if bool(args.prompts) != bool(args.out):
        raise UserError("--prompts FILE and --out FILE go together.")
    if args.prompt is not None and args.prompts:
        raise UserError("Give --prompt or --prompts, not both.")
    if args.out and Path(args.out).exists():
        raise UserError(f"--out {args.out} exists already. Give another file.")
    if args.max_new_tokens < 1 or args.temperature < 0 or not 0 < args.top_p <= 1:
        raise UserError("--max_new_tokens is 1 or more, --temperature 0 or more, and --top_p above 0 and at most 1.")
    return with_model("generate", args, partial(_answer, args))


def with_model(command: str, args: argparse.Namespace, use: Callable[..., None]) -> int | None:
    """Start the processes of a command, or as one of them call `use` with the model's options, ranks and folder."""
    set_torch_variables()
    folder = adapter_folder(args.adapter) if args.adapter else None
    config = trained_model_options(folder, args.training_options)
    if (status := relaunch_if_needed(config, args.words, ("-u", "-m", "fsdp_qlora", command))) is not None:
        return status
    from fsdp_qlora.distributed.process_group import process_group_closed
    from fsdp_qlora.distributed.ranks import read_ranks, set_up_logging

    ranks = read_ranks(config.device)
    set_up_logging(ranks, verbose=config.verbose, stream=sys.stderr)
    with process_group_closed():
        use(config, ranks, folder)
    return None


def _answer(args: argparse.Namespace, config: TrainConfig, ranks: Any, folder: Path | None) -> None:
    """Load the model and answer. Called on every rank."""
    from fsdp_qlora.data.content import Fields
    from fsdp_qlora.run.open_model import LoadedModel, answer_file, chat
    from fsdp_qlora.training.generation.generate import SamplingOptions
    from fsdp_qlora.training.generation.questions import read_questions

    rows = read_questions(Path(args.prompts)) if args.prompts else []  # before anything is loaded
    sampling = SamplingOptions(args.max_new_tokens, args.temperature, args.top_p, args.seed)
    model = LoadedModel(config, ranks, sampling, folder)
    if args.prompts:
        answer_file(model, rows, Path(args.out), config.batch_size)
    elif args.prompt is not None:
        model.stream(Fields(args.prompt, "", system=args.system), 0, sys.stdout)
    else:
        chat(model, args.system)
