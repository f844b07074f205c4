"""Uploads a run's result to the Hugging Face hub.

An upload that fails leaves the result on disk as it is.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import RepositoryNotFoundError

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.distributed.process_group import raise_on_all_ranks
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.utils.errors import RankError, TrainingError, UserError
from fsdp_qlora.utils.files import PUBLIC, read_json
from fsdp_qlora.utils.hub import HUB_TIMEOUT_SECONDS, hub_reason
from fsdp_qlora.utils.redact import redact
from fsdp_qlora.utils.run_files import BEST, RESULT
from fsdp_qlora.utils.text import first_line

log = logging.getLogger("fsdp_qlora")


def check_uploads(config: TrainConfig) -> None:
    """Refuse repositories of --push_to_hub and --mirror that cannot be written to, or are public.

    For rank 0, before training: a run of days must not end without a place for its result.

    Raises:
        RankError: as `check_repository`.
    """
    if config.push_to_hub:
        check_repository("--push_to_hub", config.push_to_hub)
    if config.mirror and config.mirror.startswith("hf:"):
        check_repository("--mirror hf:", config.mirror.removeprefix("hf:").removeprefix("//"))


def check_repository(option: str, target: str) -> None:
    """Refuse a repository on the hub that this login cannot write to, or a public one.

    :public behind its name allows a public one. A hub that does not answer now may do so at the
    end, so that is only a warning.

    Raises:
        RankError: there is no login, it has no right to write there, or the repository is public.
    """
    repo = target.removesuffix(PUBLIC)
    may_be_public = target.endswith(PUBLIC)
    if get_token() is None:
        raise RankError(
            f"{option} {repo}: there is no login on this machine. Log in with `hf auth login`, or "
            "set HF_TOKEN."
        )
    api = HfApi()
    is_public = False
    try:
        with contextlib.suppress(RepositoryNotFoundError):  # it will be made
            is_public = not api.repo_info(repo, timeout=HUB_TIMEOUT_SECONDS).private
        login = api.whoami()
    except Exception as error:  # of the HTTP library or the hub's client
        if getattr(getattr(error, "response", None), "status_code", None) == 401:
            raise RankError(
                f"{option} {repo}: the hub refuses this machine's login. Log in with `hf auth "
                "login`."
            ) from error
        log.warning("%s %s could not be checked: %s.", option, repo, hub_reason(error))
        return
    names = [login["name"], *(organization["name"] for organization in login.get("orgs", []))]
    # Of "read", "write" and "fineGrained" only the first says for certain that writing is refused.
    role = login.get("auth", {}).get("accessToken", {}).get("role")
    if repo.partition("/")[0].lower() not in map(str.lower, names) or role == "read":
        raise RankError(
            f"{option} {repo}: the login {login['name']} may not write there. Give a name of "
            f"{' or '.join(names)}, and a token that may write."
        )
    if is_public and not may_be_public:
        raise RankError(f"{option} {repo} is public. Give a private one, or {repo}{PUBLIC}.")


def upload(folder: Path, target: str) -> str | None:
    """Upload a result's files, and the files of best/ in it, in one commit.

    Args:
        target: OWNER/NAME; with :public behind it a new repository is made public, and an existing
            one may be public.
    Returns:
        None, or in a sentence why it could not be done.
    """
    repo = target.removesuffix(PUBLIC)
    try:
        # Once more: the repository may have been made public since the start of the run.
        check_repository("--push_to_hub", target)
        HfApi().create_repo(repo, private=repo == target, exist_ok=True)
        # One commit, so that nobody can load an adapter of one run with the tokenizer of another.
        operations = [CommitOperationAdd(name, path) for name, path in _files(folder)]
        HfApi().create_commit(repo, operations, commit_message="Add the result of a training run")
    except Exception as error:  # of the HTTP library, the hub's client or the file system
        reason = str(error) if isinstance(error, UserError) else f"{first_line(error)}."
        return redact(
            f"The upload to {repo} failed: {reason} The result is in {folder}. `fsdp-qlora export "
            f"RUN --out DIR --push_to_hub {target}` uploads it without training again."
        )
    log.info("Uploaded to the hub: %s (%d files)", repo, len(operations))
    return None


def push_result(folder: Path, target: str | None, ranks: Ranks) -> None:
    """Upload a run's result if --push_to_hub names a repository.

    Called on every rank; all wait for rank 0.
    """
    if target is None:
        return
    # The others wait here: torchrun ends all ranks when one has ended.
    with raise_on_all_ranks(TrainingError, ranks.device):
        if ranks.is_rank_0:
            failure = upload(folder, target)
            if failure:
                log.warning(failure)


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """(path in the repository, file) of what result.json lists here and in best/.

    Other files of the folder, such as checkpoints and metrics, stay on this machine.
    """
    for prefix in ("", f"{BEST}/"):
        result = folder / prefix / RESULT
        if result.is_file():
            for name in read_json(result)["files"]:
                yield prefix + name, folder / prefix / name
