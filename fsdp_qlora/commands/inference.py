"""The commands that load a trained model: `generate` and `evaluate`.

`generate` answers prompts, `evaluate` measures losses and lm-eval tasks.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_qlora.commands.run_config import (
    adapter_folder,
    add_adapter,
    given_adapter,
    trained_model_options,
)
from fsdp_qlora.config.conflicts import NEEDS_LM_EVAL
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.distributed.supervision.launch import relaunch_if_needed, set_torch_variables
from fsdp_qlora.utils.errors import UserError

# The functions import these themselves: torch takes seconds, which --help and wrong options need
# not wait for.
if TYPE_CHECKING:
    from fsdp_qlora.distributed.ranks import Ranks
    from fsdp_qlora.run.session import Session
    from fsdp_qlora.training.generation.prompt_format import Question
    from fsdp_qlora.training.generation.sampling import SamplingOptions


def generate_options(parser: argparse.ArgumentParser) -> None:
    add_adapter(
        parser,
        "folder of a run, an adapter or a model, or an adapter's name on the hub (default: the "
        "base alone)",
    )
    parser.add_argument(
        "--prompt", metavar="TEXT", help="one question; the answer is streamed to stdout"
    )
    parser.add_argument(
        "--image",
        metavar="FILE",
        action="append",
        default=[],
        help="image that --prompt shows, before its text or at <image> in it; may be given again",
    )
    parser.add_argument(
        "--prompts", metavar="FILE", help="file of questions, .jsonl or one in each line"
    )
    parser.add_argument("--out", metavar="FILE", help="file for the answers to --prompts, .jsonl")
    parser.add_argument("--system", metavar="TEXT", default="", help="system prompt")
    parser.add_argument(
        "--max_new_tokens",
        type=int,
        default=256,
        metavar="N",
        help="maximum tokens per answer (default: 256)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="sampling temperature; 0 (default) always takes the most likely token",
    )
    parser.add_argument(
        "--top_p",
        type=float,
        default=1.0,
        metavar="P",
        help="nucleus sampling: draw from the most likely tokens with this total probability "
        "(default: 1)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="random seed for sampling (default: 0)"
    )


def generate(args: argparse.Namespace) -> int | None:
    """Generate text with a base and its adapter, in the precision and on the cards of the training:
    sharded, offloaded as they were, one process per GPU, or on a CPU. Prompts get the format of the
    training. Without --prompt and --prompts it is a chat. The base and how it was stored are read
    from the adapter's folder; every option of training may be given too, such as --model_name,
    --nproc_per_node, --use_cpu_offload, --prompt_template and --batch_size (prompts per process at
    a time).
    """
    if bool(args.prompts) != bool(args.out):
        raise UserError("--prompts FILE and --out FILE go together.")
    if args.prompt is not None and args.prompts:
        raise UserError("Give --prompt or --prompts, not both.")
    if args.image and args.prompt is None:
        raise UserError(
            "--image FILE goes with --prompt. Rows of --prompts name their images themselves."
        )
    # Answers may have taken hours: they are never overwritten.
    if args.out and Path(args.out).exists():
        raise UserError(f"--out {args.out} exists already. Give another file.")
    if args.max_new_tokens < 1 or args.temperature < 0 or not 0 < args.top_p <= 1:
        raise UserError(
            "--max_new_tokens must be 1 or more, --temperature 0 or more, and --top_p above 0 and "
            "at most 1."
        )
    return _with_model("generate", args, partial(_answer, args))


def _with_model(command: str, args: argparse.Namespace, use: Callable[..., None]) -> int | None:
    """Start the processes of a command; in one of them call `use`.

    Args:
        use: called with the model's options, the ranks and the adapter's folder.
    Returns:
        The status of the processes that were started; None in one of them.
    """
    # Before torch is imported, which reads them once.
    set_torch_variables()
    adapter = given_adapter(args)
    folder = adapter_folder(adapter) if adapter else None
    config = trained_model_options(folder, args.training_options)
    status = relaunch_if_needed(config, args.words, ("-u", "-m", "fsdp_qlora", command))
    if status is not None:
        return status
    from fsdp_qlora.run.session import enter_rank

    # stdout is for answers and results, which other programs may read.
    use(config, enter_rank(config, sys.stderr), folder)
    return None


def _answer(
    args: argparse.Namespace, config: TrainConfig, ranks: "Ranks", folder: Path | None
) -> None:
    """Load the model and answer. Called on every rank."""
    from fsdp_qlora.run.session import open_session
    from fsdp_qlora.training.generation.sampling import SamplingOptions

    questions = _questions(args)  # before anything is loaded
    sampling = SamplingOptions(args.max_new_tokens, args.temperature, args.top_p, args.seed)
    with open_session(ranks) as session:
        _answer_in_session(args, config, session, folder, questions, sampling)


def _questions(args: argparse.Namespace) -> "list[Question]":
    """The questions of the options; none for a chat."""
    from fsdp_qlora.data.content import Fields
    from fsdp_qlora.training.generation.prompt_format import Question, read_questions

    if args.prompts:
        return read_questions(Path(args.prompts))
    if args.prompt is None:
        return []
    shows = {"images": args.image} if args.image else None
    content = Fields(args.prompt, "", system=args.system, shows=shows)
    return [Question(content, "--prompt", {})]


def _answer_in_session(
    args: argparse.Namespace,
    config: TrainConfig,
    session: "Session",
    folder: Path | None,
    questions: "list[Question]",
    sampling: "SamplingOptions",
) -> None:
    from fsdp_qlora.run.chat import chat
    from fsdp_qlora.run.open_model import LoadedModel, answer_file

    at_a_time = config.batch_size if args.prompts else 1
    model = LoadedModel(config, session, sampling, folder, questions, at_a_time=at_a_time)
    if args.prompts:
        answer_file(model, questions, Path(args.out), config.batch_size)
    elif questions:
        model.stream(model.prompts[0], 0, sys.stdout)
    else:
        chat(model, args.system)


def evaluate_options(parser: argparse.ArgumentParser) -> None:
    add_adapter(
        parser,
        "folder of a run, an adapter or a model, or an adapter's name on the hub (default: the "
        "base alone)",
    )
    parser.add_argument(
        "--dataset",
        nargs="+",
        metavar="ROWS",
        default=[],
        help="datasets to measure, named as in training; NAME=ROWS names the result",
    )
    parser.add_argument(
        "--eval_rewards",
        type=_names,
        default=[],
        metavar="F,G",
        help="functions, as in training, that score greedy answers to the rows' prompts",
    )
    parser.add_argument(
        "--tasks", type=_names, default=[], help="lm-eval tasks, separated by commas"
    )
    parser.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help="number of first questions of each task (default: all)",
    )
    parser.add_argument(
        "--num_fewshot",
        type=int,
        metavar="N",
        help="number of examples before a question (default: the task's)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _names(text: str) -> list[str]:
    """The names between commas. Raises ArgumentTypeError if there is none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"expected one name or more, got {text!r}")
    return names


def evaluate(args: argparse.Namespace) -> int | None:
    """Measure a base, an adapter or a merged model: loss per token (in nats) and perplexity on each
    dataset, scores of answers to its prompts, and tasks of lm-eval. The model is loaded as
    `generate` does, sharded over all GPUs, and rows are read as in training. Every option of
    training may be given too, such as --model_name, --nproc_per_node, --dataset_samples,
    --context_length and --batch_size.
    """
    if not args.dataset and not args.tasks:
        raise UserError("Give --dataset ROWS, --tasks NAMES, or both.")
    if args.tasks and importlib.util.find_spec("lm_eval") is None:
        raise UserError(f"--tasks {NEEDS_LM_EVAL}")
    if args.eval_rewards and not args.dataset:
        raise UserError("--eval_rewards scores answers to prompts: give --dataset ROWS.")
    args.training_options += _rows_to_measure(args)

    def show(config: TrainConfig, ranks: "Ranks", folder: Path | None) -> None:
        from fsdp_qlora.run.measure import measure
        from fsdp_qlora.run.session import open_session
        from fsdp_qlora.training.generation.tasks import Tasks

        # Prompts have no loss, so nothing is compared.
        has_no_loss = config.samples_answers and config.eval_rewards
        if config.objective_row.has_reference and not has_no_loss:
            raise UserError(
                f"--objective {config.objective} compares with the start of a run, so evaluate "
                "cannot measure it. Give the run --eval_dataset."
            )
        tasks = Tasks(args.tasks) if args.tasks else None
        options = {"limit": args.limit, "num_fewshot": args.num_fewshot}
        with open_session(ranks) as session:
            results = measure(config, session, folder, args.dataset, tasks, **options)
        if ranks.is_rank_0:
            print(json.dumps(results, indent=2) if args.json else describe(results))

    return _with_model("evaluate", args, show)


def _rows_to_measure(args: argparse.Namespace) -> list[str]:
    """The options of training that read the rows, and score answers to them."""
    if not args.dataset:
        return []
    words = ["--dataset", *args.dataset]
    if args.eval_rewards:
        functions = ",".join(args.eval_rewards)
        words += ["--eval_rewards", functions, "--eval_dataset", *args.dataset]
        # Rows without right answers are read as that objective reads them, which needs functions.
        if {"grpo", "--objective=grpo"} & {*args.training_options}:
            words += ["--rewards", functions]
    return words


def describe(results: dict[str, Any]) -> str:
    """A table with a line for each name; metrics that a name lacks are left empty."""
    # Imported here: --json does not need it.
    import pandas

    table = pandas.DataFrame.from_dict(results, orient="index").convert_dtypes()
    return str(table.astype(object).fillna("").to_string(float_format="{:.5f}".format))
