"""`generate`: the trained model answers, on the cards it was trained on."""

import argparse
import sys
from pathlib import Path

from fsdp_qlora.config.cli import parse_train_config
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.errors import LostRank, TrainingError, UserError, how_it_ends, print_error
from fsdp_qlora.launch import relaunch_if_needed
from fsdp_qlora.program.parser import Parser
from fsdp_qlora.program.run_options import OPTIONS, run_options
from fsdp_qlora.program.torch_variables import set_torch_variables
from fsdp_qlora.redact import guard_output
from fsdp_qlora.terminal import quiet_libraries

DESCRIPTION = (
    "Generate text with a base and its adapter, in the precision and on the cards of the training: sharded, offloaded "
    "as they were, one process per GPU, or on a CPU. Prompts get the format of the training. Without --prompt and "
    "--prompts it is a chat. The base and how it was stored are read from the adapter's folder; every option of "
    "training may be given too, such as --model_name, --nproc_per_node, --use_cpu_offload, --prompt_template and "
    "--batch_size (prompts per process at a time)."
)
WORKER = ("-u", "-m", "fsdp_qlora", "generate")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--adapter", metavar="DIR", help="folder of an adapter or a run; without it the base answers")
    parser.add_argument("--prompt", metavar="TEXT", help="one question; the answer goes to stdout as it comes")
    parser.add_argument("--prompts", metavar="FILE", help="file of questions, .jsonl or one in each line")
    parser.add_argument("--out", metavar="FILE", help="file for the answers to --prompts, .jsonl")
    parser.add_argument("--system", metavar="TEXT", default="", help="system prompt")
    parser.add_argument(
        "--max_new_tokens", type=int, default=256, metavar="N", help="length of an answer (default: 256)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 always takes the likeliest token (default: 0)"
    )
    parser.add_argument(
        "--top_p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw from the likeliest tokens with this share (default: 1)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (default: 0)")


def main(argv: list[str]) -> int:
    """Returns the exit status."""
    guard_output()
    set_torch_variables()
    parser = Parser("generate", DESCRIPTION)
    add_options(parser)
    try:
        args, rest = parser.split(argv)
        check(args)
        folder = Path(args.adapter).expanduser() if args.adapter else None
        config = options_of(folder, rest)
        if (status := relaunch_if_needed(config, argv, WORKER)) is not None:
            return status
        quiet_libraries()
        run(args, config, folder)
    except (UserError, TrainingError, LostRank) as error:
        print_error(error)
        return how_it_ends(error).exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def check(args: argparse.Namespace) -> None:
    """Refuse options that do not fit together. Raises UserError."""
    if bool(args.prompts) != bool(args.out):
        raise UserError("--prompts FILE and --out FILE go together.")
    if args.prompt is not None and args.prompts:
        raise UserError("Give --prompt or --prompts, not both.")
    if args.out and Path(args.out).exists():
        raise UserError(f"--out {args.out} exists already. Give another file.")
    if args.max_new_tokens < 1 or args.temperature < 0 or not 0 < args.top_p <= 1:
        raise UserError("--max_new_tokens is 1 or more, --temperature 0 or more, and --top_p above 0 and at most 1.")


def options_of(folder: Path | None, rest: list[str]) -> TrainConfig:
    """The options of training with which the model is loaded."""
    if folder and (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
        # A model of train type full or llama_pro, or a merged one.
        noted = ["--config", str(folder / OPTIONS)] if (folder / OPTIONS).is_file() else []
        given = [] if any(word.startswith("--train_type") for word in rest) else ["--train_type", "lora"]
        own = ["--model_name", str(folder), "--llama_pro_path", "none", "--adapter", "none"]
        return parse_train_config([*noted, *rest, *given, *own])
    return run_options(folder, rest, starts_from_it=folder is not None)


def run(args: argparse.Namespace, config: TrainConfig, folder: Path | None) -> None:
    """Load the model and answer. Called on every rank."""
    from fsdp_qlora.commands.generate import LoadedModel, answer_file, chat
    from fsdp_qlora.distributed import read_ranks, set_up_logging, stop_process_group
    from fsdp_qlora.generation.prompts import question, read_questions
    from fsdp_qlora.generation.sampling import SamplingOptions

    ranks = read_ranks(config.device)
    set_up_logging(ranks, verbose=config.verbose, stream=sys.stderr)
    if args.prompts:
        read_questions(Path(args.prompts))  # before anything is loaded
    sampling = SamplingOptions(args.max_new_tokens, args.temperature, args.top_p, args.seed)
    model = LoadedModel(config, ranks, sampling, folder)
    if args.prompts:
        answer_file(model, Path(args.prompts), Path(args.out), config.batch_size)
    elif args.prompt is not None:
        model.stream(question(args.prompt, system=args.system), 0, sys.stdout)
    else:
        chat(model, args.system)
    stop_process_group()
