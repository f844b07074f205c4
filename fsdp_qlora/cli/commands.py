"""The commands of `fsdp-qlora`: their options, and what each calls.

A command that is here does its work in fsdp_qlora/commands/, in a module that imports torch; it is imported when the
command runs, so that --help and wrong options answer at once. export, cache and convert are whole modules there.
"""

import argparse
import importlib.util
import json
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_qlora.cli import plan, train
from fsdp_qlora.cli.launch import relaunch_if_needed
from fsdp_qlora.commands import cache, convert, export
from fsdp_qlora.config.cli import run_options, trained_model_options
from fsdp_qlora.config.conflicts import NEEDS_LM_EVAL, adapter_folder
from fsdp_qlora.config.options import TrainConfig, option_types
from fsdp_qlora.config.text import describe_config, shipped_configs
from fsdp_qlora.errors import UserError
from fsdp_qlora.storage.files import folder_error

log = logging.getLogger("fsdp_qlora")


class Command(NamedTuple):
    """A command of `fsdp-qlora`.

    summary: one line of `fsdp-qlora --help`.
    run: is called with the parsed options, or with the words where there is no `add_options`; it may return the exit
        status. Its docstring is the description in the command's own --help.
    takes_training_options: `training_options` of the parsed options may hold words for `parse_train_config`.
    """

    summary: str
    run: Callable[[Any], int | None]
    add_options: Callable[[argparse.ArgumentParser], None] | None = None
    takes_training_options: bool = False


def _refuse_bad_folder(out: str) -> None:
    if error := folder_error("out", out):
        raise UserError(error)


# --- merge ---

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _merge_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--adapter", metavar="DIR", required=True, help="folder of the adapter, or its name on the hub")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder to make")
    parser.add_argument(
        "--base",
        choices=["original", "dequantized"],
        help="what the adapter is added to: the weights in the base's files, or these after the run's quantization, "
        "which the adapter was trained on (default: original; with --verify, the better one)",
    )
    parser.add_argument("--dtype", choices=["auto", *_DTYPES], default="auto", help="auto is that of the base")
    parser.add_argument("--verify", metavar="ROWS", help="compare both bases with the trained model: loss, divergence")
    parser.add_argument("--verify_rows", type=int, default=64, metavar="N", help="rows to compare on (default: 64)")


def _merge(args: argparse.Namespace) -> None:
    """Merge an adapter (LoRA, DoRA and their variants; ours or PEFT's) into its base, as a folder that transformers and
    vLLM load without PEFT. Memory holds one piece of a tensor at a time. The base and how it was quantized are read
    from the run's config.yaml beside the adapter; every option of training may be given instead, such as --model_name
    and --train_type.
    """
    _refuse_bad_folder(args.out)
    folder = adapter_folder(args.adapter)
    config = run_options(folder, args.training_options)
    import torch

    from fsdp_qlora.commands.merge import check_base, one_process, open_merge, write_merged
    from fsdp_qlora.commands.model_folder import check_is_new, return_freed_memory
    from fsdp_qlora.commands.verify import compare, read_rows
    from fsdp_qlora.ranks.ranks import read_ranks

    return_freed_memory()
    out = Path(args.out)
    check_is_new(out)
    ranks = read_ranks(config.device)
    merge = open_merge(folder, config)
    if args.base or not args.verify:
        check_base(merge, args.base or "original")
    rows = read_rows(merge, args.verify, args.verify_rows) if args.verify else None
    dtype = getattr(torch, _DTYPES[args.dtype]) if args.dtype in _DTYPES else None
    with one_process(ranks) as mesh:
        better = compare(merge, rows, ranks, mesh, dtype) if rows else "original"
        write_merged(merge, merge.on(args.base or better, ranks, mesh, dtype), out)


# --- gguf ---

_GGUF_TYPES = ("f16", "q8_0", "f32")


def _gguf_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", help="folder of a model, such as one of `merge`")
    parser.add_argument("--adapter", metavar="DIR", help="folder of a LoRA adapter, or its name on the hub")
    parser.add_argument("--base", metavar="DIR", help="the adapter's base; only its config.json is needed")
    parser.add_argument("--out", metavar="FILE", required=True, help="file to make")
    parser.add_argument(
        "--type", default="f16", help="f16 (the default), q8_0, f32, or with llama.cpp's package q4_k_m and the like"
    )


def _gguf(args: argparse.Namespace) -> None:
    """Write a merged model as a GGUF file, for llama.cpp and what is built on it. Llama, Mistral, Qwen2, Qwen3 and
    Gemma models with a BPE tokenizer are converted, in f16, q8_0 or f32; the package llama-cpp-python makes q4_k_m and
    the like of the first. With --adapter instead of --model it is the LoRA adapter alone, for a base in GGUF.
    """
    if bool(args.model) == bool(args.adapter):
        raise UserError("Give --model DIR or --adapter DIR.")
    if args.adapter and not args.base:
        raise UserError("--adapter needs --base DIR: the adapter's base, or a folder with its config.json.")
    folder, out = Path(args.model) if args.model else adapter_folder(args.adapter), Path(args.out)
    if out.exists():
        raise UserError(f"--out {args.out} exists already. Give another file.")
    if args.type not in _GGUF_TYPES and (args.adapter or importlib.util.find_spec("llama_cpp") is None):
        raise UserError(
            f'--type {args.type} is made by llama.cpp, of a model: pip install "fsdp_qlora[llama-cpp]". Or write f16, '
            f"of which its program makes it: llama-quantize F16.gguf OUT.gguf {args.type}"
        )
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder.")
    try:
        from fsdp_qlora.commands.gguf import write_adapter, write_model, write_quantized
    except ModuleNotFoundError as error:
        raise UserError('gguf needs the package gguf: pip install "fsdp_qlora[gguf]"') from error
    if args.adapter:
        write_adapter(folder, Path(args.base), out)
    elif args.type in _GGUF_TYPES:
        write_model(folder, out, args.type)
    else:
        write_quantized(folder, out, args.type)
    log.info("Saved: %s (%.2f GB)", out, out.stat().st_size / 1e9)


# --- generate ---


def _generate_options(parser: argparse.ArgumentParser) -> None:
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


def _generate(args: argparse.Namespace) -> int | None:
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
    return _with_model("generate", args, partial(_answer, args))


def _with_model(command: str, args: argparse.Namespace, use: Callable[..., None]) -> int | None:
    """Start the processes of a command, or as one of them call `use` with the model's options, ranks and folder."""
    train.set_torch_variables()
    folder = adapter_folder(args.adapter) if args.adapter else None
    config = trained_model_options(folder, args.training_options)
    if (status := relaunch_if_needed(config, args.words, ("-u", "-m", "fsdp_qlora", command))) is not None:
        return status
    from fsdp_qlora.ranks.process_group import process_group_closed
    from fsdp_qlora.ranks.ranks import read_ranks, set_up_logging

    ranks = read_ranks(config.device)
    set_up_logging(ranks, verbose=config.verbose, stream=sys.stderr)
    with process_group_closed():
        use(config, ranks, folder)
    return None


def _answer(args: argparse.Namespace, config: TrainConfig, ranks: Any, folder: Path | None) -> None:
    """Load the model and answer. Called on every rank."""
    from fsdp_qlora.commands.generate import LoadedModel, answer_file, chat
    from fsdp_qlora.generation.generate import SamplingOptions
    from fsdp_qlora.generation.prompts import question, read_questions

    rows = read_questions(Path(args.prompts)) if args.prompts else []  # before anything is loaded
    sampling = SamplingOptions(args.max_new_tokens, args.temperature, args.top_p, args.seed)
    model = LoadedModel(config, ranks, sampling, folder)
    if args.prompts:
        answer_file(model, rows, Path(args.out), config.batch_size)
    elif args.prompt is not None:
        model.stream(question(args.prompt, system=args.system), 0, sys.stdout)
    else:
        chat(model, args.system)


# --- evaluate ---


def _evaluate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--adapter", metavar="DIR", help="as for generate; without it the base is measured")
    parser.add_argument("--dataset", nargs="+", metavar="ROWS", default=[], help="as in training, or NAME=ROWS")
    parser.add_argument(
        "--tasks", type=lambda text: text.split(","), default=[], help="names of lm-eval's, with commas"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="the first questions of each task, this many")
    parser.add_argument("--num_fewshot", type=int, metavar="N", help="examples before a question (default: the task's)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _evaluate(args: argparse.Namespace) -> int | None:
    """Measure a base, an adapter or a merged model: loss per token (in nats) and perplexity on each dataset, and tasks
    of lm-eval. The model is loaded as `generate` does, sharded over all GPUs, and rows are read as in training. Every
    option of training may be given too, such as --model_name, --nproc_per_node, --dataset_samples, --context_length and
    --batch_size.
    """
    if not args.dataset and not args.tasks:
        raise UserError("Give --dataset ROWS, --tasks NAMES, or both.")
    if args.tasks and importlib.util.find_spec("lm_eval") is None:
        raise UserError(f"--tasks {NEEDS_LM_EVAL}")
    args.training_options += ["--dataset", *args.dataset] if args.dataset else []

    def show(config: TrainConfig, ranks: Any, folder: Path | None) -> None:
        from fsdp_qlora.commands.evaluate import describe, measure

        of_tasks = {"limit": args.limit, "num_fewshot": args.num_fewshot}
        found = measure(config, ranks, folder, args.dataset, args.tasks, **of_tasks)
        if ranks.is_rank_0:
            print(json.dumps(found, indent=2) if args.json else describe(found))

    return _with_model("evaluate", args, show)


# --- report ---


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="a run's --output_dir; also while it trains")
    parser.add_argument("--out", metavar="FILE", help="default: report.html in the run's folder; of several, here")


def _report(args: argparse.Namespace) -> None:
    """Draw the curves of runs in one HTML file that needs no network: losses, learning rate, gradient norm, speed,
    memory, time per phase, the data's lengths, samples, settings and what differs between them, environment. Several
    runs are drawn over each other. A run writes its own at its end.
    """
    from fsdp_qlora.results.report import REPORT_FILE, write_report

    folders = [Path(folder) for folder in args.runs]
    out = Path(args.out or (folders[0] / REPORT_FILE if len(folders) == 1 else REPORT_FILE))
    write_report(folders, out)
    print(out)


# --- quantize and expand ---


def _folder_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="name on the Hugging Face hub, or local folder")
    parser.add_argument("--model_name", help="the same as MODEL")
    parser.add_argument("--out", "--output_dir", metavar="DIR", help="folder to make")


def _folders(args: argparse.Namespace) -> tuple[str, Path]:
    """The model and the folder to make. Raises UserError if one is missing or cannot be a folder."""
    model = args.model or args.model_name
    if not model or not args.out:
        raise UserError("Give MODEL and --out DIR. See --help.")
    _refuse_bad_folder(args.out)
    return model, Path(args.out)


def _quantize_options(parser: argparse.ArgumentParser) -> None:
    _folder_options(parser)
    parser.add_argument("--quant_type", choices=["nf4", "fp4"], default="nf4", help="4-bit format (default: nf4)")
    parser.add_argument("--double_quant", choices=["true", "false"], default="true", help="scales too (default: true)")
    parser.add_argument(
        "--trust_remote_code", choices=["true", "false"], default="false", help="run the model's code (default: false)"
    )


def _quantize(args: argparse.Namespace) -> None:
    """Save a model in bitsandbytes' 4-bit format, as a folder that training and transformers load, with or without a
    GPU and a piece of a tensor in memory at a time (a mixture of experts is loaded by training only: bitsandbytes has
    no format for experts).
    """
    model, out = _folders(args)
    from fsdp_qlora.commands.quantize import quantize_model

    double_quant, with_code = args.double_quant == "true", args.trust_remote_code == "true"
    quantize_model(model, out, quant_type=args.quant_type, double_quant=double_quant, trust_remote_code=with_code)


def _expand_options(parser: argparse.ArgumentParser) -> None:
    _folder_options(parser)
    parser.add_argument("--expansion_rate", type=float, default=0.1, help="new blocks per block (default: 0.1)")


def _expand(args: argparse.Namespace) -> None:
    """Add blocks to a model that change nothing until they are trained (LLaMA Pro, Wu et al. 2024), for train types
    bnb_llama_pro and hqq_llama_pro. The result is a model folder; its config.json says which blocks are new.
    """
    model, out = _folders(args)
    from fsdp_qlora.commands.expand import expand_model

    expand_model(model, out, expansion_rate=args.expansion_rate)


# --- configs, env and doctor ---


def _configs_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="print these settings")


def _configs(args: argparse.Namespace) -> None:
    """List the settings that come with the program; `fsdp-qlora train --config NAME` uses them. With NAME they are
    printed, to be kept in a file and changed.
    """
    configs = shipped_configs()
    if args.name is None:
        for name, path in configs.items():
            print(f"{name:20}{describe_config(path)}")
    elif args.name in configs:
        print(configs[args.name].read_text(encoding="utf-8"), end="")
    else:
        raise UserError(f"No settings are named {args.name!r}. There are: {', '.join(configs)}.")


def _env_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs")


def _env(args: argparse.Namespace) -> None:
    """Print what a bug report needs: versions, machine, GPUs, driver, and the environment variables that change a run.
    Values of secret variables, tokens and passwords in addresses are left out.
    """
    from fsdp_qlora.output.environment import describe_environment

    facts = describe_environment()
    if args.json:
        print(json.dumps(facts, indent=2))
        return
    for heading, values in facts.items():
        print(f"{heading}:")
        for name, text in values.items():
            print(f"  {name}: {text}")


def _completion(args: argparse.Namespace) -> None:
    """Print a line for ~/.bashrc that completes words; in ~/.zshrc, `autoload -U bashcompinit; bashcompinit` first."""
    print(f'complete -o default -W "{" ".join([*COMMANDS, *(f"--{name}" for name in option_types())])}" fsdp-qlora')


def _doctor(args: argparse.Namespace) -> int:
    """Check this machine before a run, in a line each: fine, or what to do. GPUs and their kernels, what two ranks send
    each other (with NCCL on GPUs, else with gloo), links, memory, disk, logins and limits. A check takes two
    minutes at most; all run without a GPU too. The exit status is 1 if something must be fixed. `env` prints facts.
    """
    from fsdp_qlora.commands.doctor import diagnose

    is_all_fine = True
    for name, sentence, is_fine in diagnose():
        print(f"{'fine' if is_fine else 'FIX':4}  {name:14}  {sentence}", flush=True)
        is_all_fine &= is_fine
    return 0 if is_all_fine else 1


COMMANDS = {
    "train": Command("fine-tune a model", train.main),
    "plan": Command("say what a run needs on GPUs elsewhere", plan.run, plan.add_options, takes_training_options=True),
    "export": Command("export a checkpoint as an adapter", export.run, export.add_options, takes_training_options=True),
    "merge": Command("merge an adapter into its base", _merge, _merge_options, takes_training_options=True),
    "gguf": Command("write a merged model or an adapter for llama.cpp", _gguf, _gguf_options),
    "generate": Command("generate text", _generate, _generate_options, takes_training_options=True),
    "evaluate": Command(
        "measure loss and perplexity, or tasks", _evaluate, _evaluate_options, takes_training_options=True
    ),
    "report": Command("draw the curves of runs, side by side, in one HTML file", _report, _report_options),
    "quantize": Command("save a model in 4 bits", _quantize, _quantize_options),
    "expand": Command("add identity blocks (LLaMA Pro)", _expand, _expand_options),
    "cache": Command("list and prune the cache of quantized weights", cache.run, cache.add_options),
    "configs": Command("list the settings that come with the program", _configs, _configs_options),
    "convert": Command("convert a config of another trainer", convert.run, convert.add_options),
    "completion": Command("print a line that completes words in bash and zsh", _completion, lambda parser: None),
    "env": Command("print what a bug report needs", _env, _env_options),
    "doctor": Command("check this machine and say what to fix", _doctor, lambda parser: None),
}
