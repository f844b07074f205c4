"""Writes a run's result: from the model in training, from a checkpoint, or what is there when the run ends early.

An upload to the Hugging Face hub that fails does not change the result on disk.
"""

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import RepositoryNotFoundError
from peft import LoraConfig
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from fsdp_qlora.checkpoint import checkpoint
from fsdp_qlora.checkpoint.progress import Progress
from fsdp_qlora.checkpoint.saving import best_step
from fsdp_qlora.checkpoint.train_state import StoredValues
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.config.train_types import TrainType
from fsdp_qlora.distributed.process_group import raise_on_all_ranks
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.export import save_results as save
from fsdp_qlora.export.card import Base, documents, training_record
from fsdp_qlora.model.adapters.first_values import LiveValues, Values
from fsdp_qlora.sharding.loading.weight_files import WeightFiles
from fsdp_qlora.utils.errors import RankError, TrainingError, UserError
from fsdp_qlora.utils.files import PUBLIC, read_json
from fsdp_qlora.utils.hub import HUB_TIMEOUT_SECONDS, hub_reason
from fsdp_qlora.utils.redact import redact
from fsdp_qlora.utils.run_files import BEST, CARD, CHECKPOINTS, RESULT
from fsdp_qlora.utils.text import first_line

log = logging.getLogger("fsdp_qlora")


@dataclass(frozen=True)
class ResultForm:
    """The form of a run's results, whatever the step: an adapter if there is its configuration, else a whole model.

    base_folder: with the base's weights and configuration, model_config. dtype: of a whole model's floats.
    """

    model: PreTrainedModel
    model_config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    base: Base
    base_folder: Path
    kind: TrainType
    adapter: LoraConfig | None
    dtype: torch.dtype

    def save(self, values: Values, output_dir: Path, *, about: Mapping[str, Any], progress: Mapping[str, Any]) -> None:
        """Save the adapter, or the whole model if its blocks or all weights were trained. Called on every rank.

        Args:
            about, progress: as in a checkpoint of the step.
        Raises:
            TrainingError: it could not be written, on rank 0.
        """
        record = training_record(about, progress, self.base, self.kind)
        texts = documents(record, kind=self.kind.adapter)
        if template := (record["prompt"] or {}).get("chat_template"):
            self.tokenizer.chat_template = template  # that was trained with
        if self.adapter is not None:
            sidecar = save.SidecarFiles(self.tokenizer, texts)
            save.save_adapter(self.model, self.adapter, sidecar, output_dir, values=values)
            return
        sidecar = save.SidecarFiles(self.tokenizer, texts, self.base_folder)
        base = WeightFiles(self.base_folder) if self.kind.trains_new_blocks else None
        save.save_model(self.model, self.model_config, sidecar, output_dir, base=base, dtype=self.dtype, values=values)

    def save_checkpoint(self, folder: Path, state: Mapping[str, Any], output_dir: Path) -> None:
        """Save the result of a checkpoint. For one process; a model in training must not be needed meanwhile.

        Args:
            state: its state.json.
        Raises:
            UserError: the checkpoint is of another model.
            TrainingError: the result could not be written.
            DamagedCheckpoint: the checkpoint cannot be read.
        """
        values = StoredValues(self.model, folder, state["tensors"])
        try:
            self.save(values, output_dir, about=state["about"], progress=state["progress"])
        finally:
            values.close()

    def leave_adapters(self, output_dir: Path, *, newest: bool) -> None:
        """Save the newest checkpoint's adapter in the run's folder, and the best one's, if any, in best/. For rank 0.

        A failure is only logged, because the checkpoints contain everything.
        """
        folders = checkpoint.published(output_dir / CHECKPOINTS)
        wanted = {output_dir: max(folders, default=None) if newest else None, output_dir / BEST: best_step(folders)}
        for target, step in wanted.items():
            if step is None:
                continue
            is_best = target != output_dir
            try:
                # The newest one has just been written; the best may have been there for days.
                state = checkpoint.verify(folders[step]) if is_best else read_json(folders[step] / checkpoint.STATE)
                self.save_checkpoint(folders[step], state, target)
            except (OSError, KeyError, ValueError, TrainingError) as error:
                log.warning("The adapter of step %d was not saved in %s: %s", step, target, error)
            else:
                loss = state["progress"]["eval_loss"] if is_best else None
                what = f", the lowest held-out loss ({loss:.4f})" if loss is not None else ""
                log.info("Adapter of step %d%s: %s", step, what, target)

    def log_how_to_load(self, output_dir: Path) -> None:
        """Say where it is written how to load an adapter whose base is a local folder."""
        if self.adapter is not None and not self.base.is_on_hub:
            log.info("How to load the adapter and its base, a local folder: %s", output_dir / CARD)


def save_result(
    form: ResultForm, ranks: Ranks, output_dir: Path, *, about: Mapping[str, Any], progress: Progress
) -> None:
    """Save the adapter, or the whole model if its blocks or all weights were trained. Called on every rank.

    Raises:
        TrainingError: it could not be written; the same on every rank.
    """
    values = LiveValues(form.model, keeps=ranks.is_rank_0)
    with raise_on_all_ranks(TrainingError, ranks.device):
        form.save(values, output_dir, about=about, progress=progress.to_dict())
        if ranks.is_rank_0:
            form.leave_adapters(output_dir, newest=False)
            form.log_how_to_load(output_dir)


def leave_result(form: ResultForm, output_dir: Path, ranks: Ranks) -> None:
    """Save the adapters of the newest and the best checkpoint when the run ends early. Called on every rank.

    The other ranks wait for rank 0, because torchrun ends all of them when one has ended.
    """
    with raise_on_all_ranks(TrainingError, ranks.device):
        if ranks.is_rank_0 and form.adapter is None:
            log.info("The newest checkpoint can be made a model: fsdp-qlora export %s --out DIR", output_dir)
        elif ranks.is_rank_0:
            form.leave_adapters(output_dir, newest=True)
            form.log_how_to_load(output_dir)


# --- the upload ---


def check_uploads(config: TrainConfig) -> None:
    """Refuse repositories of --push_to_hub and --mirror that cannot be written to, or are public; for rank 0.

    Raises:
        RankError: as `check_repository`.
    """
    if config.push_to_hub:
        check_repository("--push_to_hub", config.push_to_hub)
    if config.mirror and config.mirror.startswith("hf:"):
        check_repository("--mirror hf:", config.mirror.removeprefix("hf:").removeprefix("//"))


def check_repository(option: str, target: str) -> None:
    """Refuse a repository on the hub that this login cannot write to, or that everybody can read without :public.

    A hub that does not answer now may do so at the end, so that is only a warning.

    Raises:
        RankError: there is no login, it has no right to write there, or the repository is public.
    """
    repo, may_be_public = target.removesuffix(PUBLIC), target.endswith(PUBLIC)
    if get_token() is None:
        raise RankError(
            f"{option} {repo}: there is no login on this machine. Log in with `hf auth login`, or set HF_TOKEN."
        )
    api, is_public = HfApi(), False
    try:
        with contextlib.suppress(RepositoryNotFoundError):  # it will be made
            is_public = not api.repo_info(repo, timeout=HUB_TIMEOUT_SECONDS).private
        login = api.whoami()
    except Exception as error:  # of the HTTP library or the hub's client
        if getattr(getattr(error, "response", None), "status_code", None) == 401:
            raise RankError(
                f"{option} {repo}: the hub refuses this machine's login. Log in with `hf auth login`."
            ) from error
        log.warning("%s %s could not be checked: %s.", option, repo, hub_reason(error))
        return
    names = [login["name"], *(one["name"] for one in login.get("orgs", []))]
    role = login.get("auth", {}).get("accessToken", {}).get("role")
    if repo.partition("/")[0].lower() not in map(str.lower, names) or role == "read":
        raise RankError(
            f"{option} {repo}: the login {login['name']} may not write there. Give a name of {' or '.join(names)}, and "
            "a token that may write."
        )
    if is_public and not may_be_public:
        raise RankError(f"{option} {repo} is public. Give a private one, or {repo}{PUBLIC}.")


def upload(folder: Path, target: str) -> str | None:
    """Upload a result's files, and those of best/ in it, in one commit.

    Args:
        target: OWNER/NAME; with :public behind it a new repository is made public, and an old one may be.
    Returns:
        None, or in a sentence why it could not be done.
    """
    repo = target.removesuffix(PUBLIC)
    try:
        check_repository("--push_to_hub", target)
        HfApi().create_repo(repo, private=repo == target, exist_ok=True)
        operations = [CommitOperationAdd(name, path) for name, path in _files(folder)]
        HfApi().create_commit(repo, operations, commit_message="Add the result of a training run")
    except Exception as error:  # of the HTTP library, the hub's client or the file system
        reason = str(error) if isinstance(error, UserError) else f"{first_line(error)}."
        return redact(
            f"The upload to {repo} failed: {reason} The result is in {folder}. `fsdp-qlora export RUN --out DIR "
            f"--push_to_hub {target}` uploads it without training again."
        )
    log.info("Uploaded to the hub: %s (%d files)", repo, len(operations))
    return None


def push_result(folder: Path, target: str | None, ranks: Ranks) -> None:
    """Upload a run's result if --push_to_hub names a repository. Called on every rank; all wait for rank 0."""
    if target is None:
        return
    with raise_on_all_ranks(TrainingError, ranks.device):
        if ranks.is_rank_0 and (failure := upload(folder, target)):
            log.warning(failure)


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """(path in the repository, file) of what result.json lists here and in best/."""
    for prefix in ("", f"{BEST}/"):
        result = folder / prefix / RESULT
        if result.is_file():
            for name in json.loads(result.read_text())["files"]:
                yield prefix + name, folder / prefix / name
