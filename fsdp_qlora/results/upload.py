"""Uploads a result to the Hugging Face hub. A failed upload does not change the local result."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import RepositoryNotFoundError

from fsdp_qlora.checkpointing.run_folder import BEST, RESULT
from fsdp_qlora.loading.hub import ask_hub, first_line, hub_reason
from fsdp_qlora.output.redact import redact
from fsdp_qlora.ranks.distributed import Ranks, first_failure

log = logging.getLogger("fsdp_qlora")


def login_advice(repo: str) -> str | None:
    """A line for the start of a run whose upload cannot succeed; None if there is a login."""
    if get_token():
        return None
    return (
        f"--push_to_hub {repo}: there is no login on this machine (`hf auth login`, or HF_TOKEN). Without one the "
        "upload at the end fails, and the result is only in output_dir."
    )


def upload(folder: Path, repo: str, *, public: bool) -> str | None:
    """Upload a result's files, and those of best/ in it, in one commit.

    Args:
        public: whether a repository that is not there yet is made public.
    Returns:
        None, or in a sentence why it could not be done.
    """
    refusal = ask_hub(repo, "model")
    if refusal is not None and not isinstance(refusal, RepositoryNotFoundError):
        return _failure(folder, repo, hub_reason(refusal))
    try:
        HfApi().create_repo(repo, private=not public, exist_ok=True)
        operations = [CommitOperationAdd(name, path) for name, path in _files(folder)]
        HfApi().create_commit(repo, operations, commit_message="Add the result of a training run")
    except Exception as error:  # of the HTTP library, the hub's client or the file system
        return _failure(folder, repo, first_line(error))
    visibility = "its visibility is as it was" if refusal is None else "public" if public else "private"
    log.info("Uploaded to the hub: %s (%d files, %s)", repo, len(operations), visibility)
    return None


def push_result(folder: Path, repo: str | None, ranks: Ranks, *, public: bool) -> None:
    """Upload a run's result if --push_to_hub names a repository. Called on every rank; all wait for rank 0."""
    if repo is None:
        return
    if ranks.is_rank_0 and (failure := upload(folder, repo, public=public)):
        log.warning(failure)
    first_failure(None, ranks.device)


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """(path in the repository, file) of what result.json lists here and in best/."""
    for prefix in ("", f"{BEST}/"):
        result = folder / prefix / RESULT
        if result.is_file():
            for name in json.loads(result.read_text())["files"]:
                yield prefix + name, folder / prefix / name


def _failure(folder: Path, repo: str, reason: str) -> str:
    return redact(
        f"The upload to {repo} failed: {reason}. The result is in {folder}. `fsdp-qlora export RUN --out DIR "
        f"--push_to_hub {repo}` uploads it without training again."
    )
