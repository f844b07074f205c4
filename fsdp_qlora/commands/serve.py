"""`fsdp-qlora serve`: its options, and the processes that it starts."""

import argparse
import importlib.util
import logging
import os
import sys
from pathlib import Path

from fsdp_qlora.commands.run_config import parse_train_config
from fsdp_qlora.config.text import url_error
from fsdp_qlora.distributed.supervision.launch import (
    importing,
    is_started_by_others,
    relaunch_if_needed,
    set_torch_variables,
)
from fsdp_qlora.service.access import NO_KEY
from fsdp_qlora.utils.errors import UserError

log = logging.getLogger("fsdp_qlora")

_MODULE = ("-u", "-m", "fsdp_qlora", "serve")
_KEY_VARIABLE = "TINKER_API_KEY"
_KEY_HELP = (
    "API key that clients must send (default: TINKER_API_KEY, else a random key that is kept in "
    "the folder); none for no key"
)
_DEFAULTS = {"--lora_rank": "32", "--batching": "packed"}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--folder",
        required=True,
        metavar="DIR",
        help="folder for adapters, checkpoints and the request log",
    )
    parser.add_argument(
        "--port", type=int, default=8000, metavar="N", help="port to listen on (default: 8000)"
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="NAME",
        help="address to bind; 0.0.0.0 accepts other machines (default: 127.0.0.1)",
    )
    parser.add_argument("--api_key", metavar="KEY", help=_KEY_HELP)
    parser.add_argument(
        "--teacher",
        metavar="NAME",
        help="second, frozen model that clients can sample from and compute log-probabilities with",
    )
    parser.add_argument(
        "--rollout_url",
        metavar="URL",
        help="server with vLLM's API that draws the samples, beside training; it is sent each "
        "saved adapter that clients sample from",
    )
    parser.add_argument(
        "--max_models",
        type=int,
        default=8,
        metavar="N",
        help="maximum adapters in memory (default: 8)",
    )


def run(args: argparse.Namespace) -> int | None:
    """Serve training to programs that speak Tinker's protocol, on these GPUs: forward and backward
    passes, optimizer steps, samples and checkpoints of many adapters over one base, which is loaded
    as for a run. Every option of training about the model, memory and supervision may be given,
    such as --model_name, --train_type, --nproc_per_node, --use_cpu_offload and --save_every.
    --lora_rank is the maximum rank of an adapter (default: 32). --context_length is the maximum
    tokens per row (default: 4096, or the model's limit). A pass has at most batch_size x
    context_length tokens.
    """
    # They come with an extra, which training does not need.
    libraries = ("tinker", "fastapi", "uvicorn")
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"serve needs {', '.join(missing)}: pip install 'fsdp_qlora[serve]'")
    if args.max_models < 1:
        raise UserError(f"--max_models must be 1 or more, but is {args.max_models}.")
    if args.rollout_url is not None:
        error = url_error("rollout_url", args.rollout_url)
        if error is not None:
            raise UserError(error)
    if args.api_key not in (None, NO_KEY):
        # The processes that are started inherit it without showing it.
        os.environ[_KEY_VARIABLE] = args.api_key
        _hide_key(args.words)
    given = {word.partition("=")[0] for word in args.training_options}
    words = list(args.training_options)
    for name, value in _DEFAULTS.items():
        if name not in given:
            words += [name, value]
    config = parse_train_config([*words, "--output_dir", args.folder])
    set_torch_variables()
    if not config.is_preview:
        status = relaunch_if_needed(config, args.words, _MODULE)
        if status is not None:
            return status
    # Imported here, so that --help and wrong options answer at once.
    with importing():
        from fsdp_qlora.service.main import serve
        from fsdp_qlora.service.opening import ServeOptions

    key = NO_KEY if args.api_key == NO_KEY else os.environ.get(_KEY_VARIABLE)
    options = ServeOptions(
        args.host,
        args.port,
        Path(args.folder).expanduser(),
        args.max_models,
        key,
        args.teacher,
        args.rollout_url,
    )
    serve(config, options)
    return None


def _hide_key(words: list[str]) -> None:
    """Start this program again without the key in its arguments; the environment has it."""
    # All users of a machine can read arguments (ps), and only the owner the environment. Another
    # launcher's own arguments have the key as well, so a new start would not hide it.
    if is_started_by_others():
        log.warning(
            "Every user of this machine can read --api_key in the launcher's arguments. Set %s "
            "instead.",
            _KEY_VARIABLE,
        )
        return
    without_key: list[str] = []
    for word in words:
        # The word behind --api_key is the key: both go.
        if without_key and without_key[-1] == "--api_key":
            without_key.pop()
        elif not word.startswith("--api_key=") and not word.startswith("--api-key="):
            without_key.append("--api_key" if word == "--api-key" else word)
    # exec drops what Python has buffered.
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *_MODULE, *without_key])
