"""`fsdp-qlora train`: options, then one process per GPU, then the run itself.

The run is `fsdp_qlora.run.train.run`. It calls `train` in fsdp_qlora/training/loop.py;
the optimizer step is in training/trainer.py.
"""

import argparse
import faulthandler
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from fsdp_qlora.checkpoint.run_folder import (
    StartRequest,
    find_differences,
    is_run,
    read_run,
    refuse,
)
from fsdp_qlora.commands.run_config import parse_train_config
from fsdp_qlora.config.marks import MAY_DIFFER
from fsdp_qlora.config.objectives import TEXTS
from fsdp_qlora.config.options import TrainConfig, names_marked
from fsdp_qlora.config.text import resolved_options
from fsdp_qlora.data.sources.dataset_name import parse_eval_names, parse_name
from fsdp_qlora.distributed.supervision import restarts
from fsdp_qlora.distributed.supervision.launch import (
    WORKER,
    importing,
    is_started_by_others,
    relaunch_if_needed,
    set_torch_variables,
)
from fsdp_qlora.distributed.supervision.stops import Signals
from fsdp_qlora.utils.errors import (
    Crashed,
    LostRank,
    RunStopped,
    TrainingError,
    UserError,
    how_it_ends,
    note_reason,
    print_error,
)
from fsdp_qlora.utils.redact import guard_output, redact_values
from fsdp_qlora.utils.text import quiet_libraries

# A path, and not a name on the hub: it begins as one, or ends as a file of rows or prompts.
_PATH = re.compile(
    r"(~|\.{0,2})/.*|.*\.(jsonl?|csv|tsv|parquet|txt|jinja|j2)(\.(gz|zst))?",
    re.DOTALL | re.IGNORECASE,
)

_MOST_BYTES = 2**22  # of a file whose first rows are looked at twice
_FILES = ("sample_prompts", "prompt_template")


def main(argv: list[str]) -> int:
    """Train with these options.

    Returns:
        The exit status of the started processes, or of an earlier attempt that was final; else 0.
    """
    guard_output()
    set_torch_variables()
    # A launcher such as torchrun restarts any failure; a wrong option fails again each time.
    final_exit = restarts.previous_exit()
    if final_exit is not None:
        status, message = final_exit
        print_error(
            RuntimeError(f"not restarted, since the previous attempt ended for good: {message}")
        )
        return status
    signals = Signals(ends_process=True)
    try:
        with signals.handled():
            notes: list[str] = []
            config = parse_train_config(argv, notes=notes)
            refuse_early(config)
            refuse_names(config)
            # A preview is one process, whatever it plans for.
            if not config.is_preview:
                status_of_workers = relaunch_if_needed(config, argv)
                if status_of_workers is not None:
                    return status_of_workers
            sys.argv = redact_values(sys.argv)  # wandb keeps a copy
            quiet_libraries()
            # A crash in a library shows where Python was.
            if sys.__stderr__ and not faulthandler.is_enabled():
                faulthandler.enable(sys.__stderr__)
            # Imported here so that --help and wrong options answer at once.
            with importing():
                from fsdp_qlora.run.train import run

            run(config, signals, notes)
    except (UserError, TrainingError, RunStopped) as error:
        restarts.record_exit(how_it_ends(error), str(error))
        raise
    except (LostRank, Crashed):  # which have noted their reason
        raise
    except Exception as error:
        note_reason(f"{type(error).__name__}: {error}")
        raise
    return 0


def teach_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="DIR", help="folder to make, the same as --output_dir")


def teach(args: argparse.Namespace) -> int:
    """Compute the probabilities of a teacher (--teacher) for all rows, with the options of `train`,
    and store them in --output_dir. A run of --objective distill on any machine takes that folder as
    --teacher.
    """
    set_torch_variables()
    out = ["--output_dir", args.out] if args.out else []
    config = parse_train_config([*args.training_options, *out])
    refuse_names(config)
    status = relaunch_if_needed(config, args.words, (*WORKER[:-1], "teach"))
    if status is not None:
        return status
    # Imported here, so that --help and wrong options answer at once.
    from fsdp_qlora.run.teach import teach as run

    run(config)
    return 0


# --- what needs no torch ---


def refuse_early(config: TrainConfig) -> None:
    """Refuse missing files, and options that differ from those of the run in output_dir.

    Needs no torch, so that it answers at once.

    Raises:
        UserError: all that is missing, or all that differs.
    """
    missing = list(_missing(config))
    if missing:
        # All at once: a user who mends one path at a time would start again for each.
        raise UserError("\n  ".join(missing))
    folder = Path(config.output_dir).expanduser()
    # The number of ranks is not known before the launch.
    if not config.is_preview and config.resume == "auto" and is_run(folder):
        request = StartRequest(resolved_options(config), names_marked(MAY_DIFFER), world_size=-1)
        differences = find_differences(read_run(folder), {}, request)
        if differences:
            refuse(folder, differences)


def refuse_names(config: TrainConfig) -> None:
    """Refuse a model that is nowhere, unknown datasets, and small files with unknown columns.

    Raises:
        UserError: as the run would say it, some imports later.
    """
    # The hub's client takes a while to import.
    from fsdp_qlora.data.sources import source as sources
    from fsdp_qlora.data.text import recognition
    from fsdp_qlora.utils import hub

    if not is_started_by_others() and not hub.is_here(config.model_name):
        _find_on_hub(config.model_name, with_code=config.trust_remote_code)
    requested = recognition.RequestedFormat(
        config.dataset_format, recognition.parse_columns(config.columns)
    )
    for name in map(parse_name, config.dataset):
        path = Path(name.name).expanduser()
        is_known = name.name in (*sources.DATASETS, sources.DUMMY)
        if is_known or hub.is_hub_name(name.name) or path.is_dir():
            continue  # found later, perhaps over the network
        source = sources.find_source(name)
        if (
            path.is_file()
            and path.stat().st_size <= _MOST_BYTES
            and config.objective_row.kind_of_rows(config) == TEXTS
        ):
            # As many rows as the run itself looks at to find their columns.
            num_rows = min(sources.ROWS_PER_BATCH, config.dataset_samples or 10**9)
            entries = source.entries(num_rows, used=requested.used)
            rows = [entry.row for entry in entries if isinstance(entry.row, dict)]
            columns = list(dict.fromkeys(itertools.chain(*rows)))
            first = rows[: sources.ROWS_LOOKED_AT]
            if rows:
                requested.find(columns, first, source.origin)


def _find_on_hub(model_name: str, *, with_code: bool) -> None:
    """Download a model's small files.

    Raises:
        UserError: there is no such model; for a name that only `plan` knows, with the hub's name.
    """
    from fsdp_qlora.planning.known_models import hub_name
    from fsdp_qlora.utils import hub

    try:
        hub.find_model_folder(model_name, with_weights=False, with_code=with_code, is_preview=True)
    except UserError as error:
        full = hub_name(model_name)
        hint = f" The name on the hub is {full}." if full != model_name else ""
        raise UserError(f"{error}{hint}") from error


def _missing(config: TrainConfig) -> Iterator[str]:
    """A sentence for each path that leads nowhere."""
    paths = []  # the option, the word as it was given, and the path in it
    for option in ("model_name", *_FILES):
        word = getattr(config, option)
        if word:
            paths.append((option, word, word))
    paths += [("dataset", word, parse_name(word).name) for word in config.dataset]
    eval_datasets = parse_eval_names(config.eval_dataset).values()
    for word, dataset in zip(config.eval_dataset, eval_datasets, strict=True):
        paths.append(("eval_dataset", word, parse_name(dataset, weighted=False).name))
    for option, word, path in paths:
        if _PATH.fullmatch(path) and not Path(path).expanduser().exists():
            what = "folder" if option == "model_name" else "file or folder"
            yield f"{option} {word}: there is no such {what}. Check the path."
    model = Path(config.model_name).expanduser()
    if model.is_dir() and not (model / "config.json").is_file():
        yield (
            f"model_name {config.model_name}: it has no config.json, so it is not a model's folder."
        )
