"""The command `export`: a checkpoint as an adapter or a model, without a GPU or the base's weights."""

import argparse
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_qlora.commands.run_config import parse_train_config
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.utils.errors import TrainingError, UserError
from fsdp_qlora.utils.files import refuse_bad_folder, staged_folder

log = logging.getLogger("fsdp_qlora")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="CHECKPOINT|RUN", help="a checkpoint's folder, or a run's: its newest one")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to make")
    parser.add_argument("--best", action="store_true", help="take the run's checkpoint of the lowest held-out loss")


def run(args: argparse.Namespace) -> None:
    """Export a checkpoint as the folder that the run would have saved at that step: an adapter in PEFT's format with
    its tokenizer and card, or for full and the llama_pro types a whole model. It needs no GPU, and of the base only the
    small files (for the llama_pro types its weights too). Of the options of training, --model_name says where the base
    is now, and --base_name, --push_to_hub and --trust_remote_code mean what they do there.
    """
    source, out = Path(args.source).expanduser(), Path(args.out).expanduser()
    refuse_bad_folder("out", args.out)
    parse_train_config(args.training_options)  # wrong ones are said at once
    from fsdp_qlora.checkpoint import checkpoint
    from fsdp_qlora.checkpoint.saving import find_checkpoint
    from fsdp_qlora.export.model_folder import check_is_new
    from fsdp_qlora.export.write_results import upload
    from fsdp_qlora.run.load_model import result_form

    check_is_new(out)
    folder = find_checkpoint(source, best=args.best)
    try:
        state = checkpoint.verify(folder)
    except checkpoint.DamagedCheckpoint as error:
        raise UserError(f"{folder} is damaged: {error}. Give another checkpoint.") from error
    except OSError as error:
        raise UserError(f"{folder} cannot be read now: {error}.") from error
    config = stored_config(state["about"], args.training_options)
    form = result_form(config, _plan(config))
    try:
        with staged_folder(out) as partial:
            form.save_checkpoint(folder, state, partial)
    except (OSError, TrainingError) as error:
        raise UserError(f"--out {out} cannot be written: {error}.") from error
    log.info("Step %d of %s: %s", state["progress"]["step"], source, out)
    form.log_how_to_load(out)
    if config.push_to_hub and (failure := upload(out, config.push_to_hub)):
        raise UserError(failure)


def stored_config(about: Mapping[str, Any], words: Sequence[str] = ()) -> TrainConfig:
    """The options of the run that a checkpoint belongs to, for this machine's CPU; those in `words` win."""
    precision = about["facts"].get("precision") or "auto"
    return parse_train_config(["--device", "cpu", *words], about["options"] | {"precision": precision})


def _plan(config: TrainConfig) -> Any:
    """The run's model without weights, from the small files of its base."""
    from fsdp_qlora.distributed.ranks import read_ranks
    from fsdp_qlora.planning.plan import Machine, build_plan, read_model

    needs_weights = config.kind.trains_new_blocks  # the result holds the base's tensors too
    try:
        found = read_model(config, with_weights=needs_weights)
    except UserError as error:
        raise UserError(f"{error} --model_name says where the run's base model is now.") from error
    return build_plan(config, Machine.of(config, read_ranks("cpu")), *found)
