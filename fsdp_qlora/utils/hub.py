"""Models and datasets on the Hugging Face hub: reachability, reasons of failures, downloads."""

import logging
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from huggingface_hub import HfApi, ModelInfo, snapshot_download, try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import disable_progress_bars, filter_repo_objects

from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import refuse_pipes
from fsdp_qlora.utils.machine import free_disk
from fsdp_qlora.utils.text import first_line

log = logging.getLogger("fsdp_qlora")

Once = Callable[[Callable[[], str], str], str]
"""Calls a download function, with its name for messages, on one rank of the machine. See
`store.once_per_machine`.
"""

HUB_TIMEOUT_SECONDS = 10
# Copies of the weights in other formats, which some repositories have in addition to the usual
# files.
_NOT_NEEDED = ["consolidated*", "*/*"]
_WEIGHTS = ["*.safetensors"]
SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]

# The first matching row applies.
_REASONS: dict[type[Exception], str] = {
    GatedRepoError: "on the hub it is gated: accept its terms on its page there, then log in with "
    "`hf auth login` or set HF_TOKEN",
    RepositoryNotFoundError: "the hub has no repository of this name that your login can see: "
    "check the spelling, or set HF_TOKEN if it is private",
    HFValidationError: "it is not a valid name on the hub",
}


def is_hub_name(name: str) -> bool:
    """Whether a name has the form owner/name and does not look like a path to a file."""
    looks_like_file = re.search(r"\.[A-Za-z]\w*$", name) is not None
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is not None and not looks_like_file


def is_here(model: str) -> bool:
    """Whether a model is a local path, or in the hub's cache."""
    cached = try_to_load_from_cache(model, "config.json") if is_hub_name(model) else None
    return Path(model).expanduser().exists() or isinstance(cached, str)


def ask_hub(name: str, repo_type: str) -> Exception | None:
    """Ask the hub once whether a model or dataset exists; returns the error if it does not.

    `hub_reason` explains the error.
    """
    # With a short timeout: the hub's own downloads retry for 20 s without DNS, and wait forever
    # behind a firewall that drops packets.
    try:
        HfApi().repo_info(name, repo_type=repo_type, timeout=HUB_TIMEOUT_SECONDS)
    # The hub's client or its HTTP library, which differs between versions.
    except Exception as error:
        return error
    return None


def hub_reason(error: Exception) -> str:
    """The reason why a model or dataset cannot be downloaded, as a part of a sentence."""
    for kind, reason in _REASONS.items():
        if isinstance(error, kind):
            return reason
    return f"the Hugging Face hub is out of reach ({first_line(error)})"


def conversion_advice(model: str) -> str:
    """Advice for converting pickled weights to safetensors."""
    target = f"{Path(model).name}-safetensors"
    code = (
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
        f"M.from_pretrained({model!r}, dtype='auto').save_pretrained({target!r}); "
        f"T.from_pretrained({model!r}).save_pretrained({target!r})"
    )
    return f'If you trust them, convert them and give --model_name {target}: python -c "{code}"'


def find_model_folder(
    model_name: str,
    *,
    with_weights: bool,
    with_code: bool = False,
    is_preview: bool = False,
    revision: str | None = None,
    once: Once | None = None,
) -> Path:
    """The local folder of a model: `model_name`, or the hub's snapshot, downloaded if needed.

    Local rank 0 downloads while the other ranks of its machine wait. If two runs need the same
    file, the hub's client downloads it once. Interrupted connections resume; after a kill, complete
    files are kept.

    Args:
        with_weights, with_code: download safetensors files, Python files.
        is_preview: the weights will not be downloaded later, so no disk space is needed for them.
        revision: a commit of the model on the hub; None for the newest.
        once: lets one rank of a machine download for all; None: this process downloads by itself.
    Raises:
        UserError: the model cannot be used or downloaded, the same on every rank of a machine.
        LostRank: raised by `once`: local rank 0 has ended, or the download takes too long.
    """
    folder = Path(model_name).expanduser()
    if folder.is_dir():
        refuse_pipes(folder, "model_name")
        return folder
    if folder.exists():
        raise UserError(f"model_name {model_name} is a file. Give the model's folder.")
    if re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model_name, re.ASCII) is None:
        raise UserError(
            f"model_name {model_name}: there is no such folder. Check the path, or give a name on "
            "the hub."
        )
    patterns = list(SMALL_FILES)
    if with_weights:
        patterns += _WEIGHTS
    if with_code:
        patterns.append("*.py")

    def download() -> str:
        if os.environ.get("RANK", "0") != "0":
            disable_progress_bars()
        return _snapshot(model_name, patterns, revision, later=[] if is_preview else _WEIGHTS)

    what = f"the download of {model_name}" if with_weights else f"the configuration of {model_name}"
    return Path(once(download, what) if once else download())


def download_adapter(name: str) -> Path:
    """The hub's snapshot of an adapter, whose files are downloaded if needed."""
    patterns = [*SMALL_FILES, "adapter_model.safetensors"]
    refusal = ask_hub(name, "model")
    return Path(_download(name, f"--adapter {name}: there is no such folder", patterns, refusal))


def fetch_weights(model_name: str, folder: Path, once: Once) -> None:
    """Download the weights of a model folder that `find_model_folder` has returned without them."""
    # The folder's name is the commit: the model may have got a newer one since.
    if not Path(model_name).expanduser().is_dir():  # otherwise the folder is the user's own
        find_model_folder(model_name, with_weights=True, revision=folder.name, once=once)


def _snapshot(
    model_name: str, patterns: list[str], revision: str | None, *, later: list[str]
) -> str:
    """Download the files that match `patterns`.

    Args:
        later: patterns of files that must fit on the disk too.
    """
    refusal: Exception | None = None
    try:
        info = HfApi().model_info(
            model_name, revision=revision, timeout=HUB_TIMEOUT_SECONDS, files_metadata=True
        )
    except Exception as error:  # as in `ask_hub`
        refusal = error
        log.info("Looking for a copy of %s on this machine: %s.", model_name, hub_reason(refusal))
    else:
        _check_download(model_name, info, patterns, later)
    problem = f"model_name {model_name}: there is no such local folder"
    return _download(model_name, problem, patterns, refusal, revision)


def _download(
    name: str,
    problem: str,
    patterns: list[str],
    refusal: Exception | None,
    revision: str | None = None,
) -> str:
    """The hub's snapshot with the files that match `patterns`.

    Args:
        problem: how the error message begins.
        refusal: the hub's error; then only a copy on this machine is used.
    """
    try:
        return snapshot_download(
            name,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=_NOT_NEEDED,
            local_files_only=refusal is not None,
        )
    except Exception as error:  # as in `ask_hub`, or the file system's
        reason = hub_reason(refusal) if refusal else f"its download failed ({first_line(error)})"
        raise UserError(
            f"{problem}, and {reason}. Without the hub, give the path of its folder."
        ) from error


def _check_download(
    model_name: str, info: ModelInfo, patterns: list[str], later: list[str]
) -> None:
    """Refuse pickled weights, and files that do not fit on the disk, before any download."""
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    pickled = [name for name in sizes if name.endswith(".bin") and "/" not in name]
    weights = filter_repo_objects(sizes, allow_patterns=_WEIGHTS, ignore_patterns=_NOT_NEEDED)
    if pickled and not list(weights):
        raise UserError(
            f"model_name {model_name} has only pickled weights ({pickled[0]}), which are not "
            f"supported: they can run code. {conversion_advice(model_name)}"
        )
    missing = _missing(model_name, info, sizes, [*patterns, *later])
    size = sum(sizes[name] for name in missing)
    folder = Path(HF_HUB_CACHE)
    free = free_disk(folder)
    if size > free:
        raise UserError(
            f"model_name {model_name}: the download needs {size / 2**30:.1f} GiB in {folder}, "
            f"where {free / 2**30:.1f} GiB are free. Free some space, or set HF_HUB_CACHE to a "
            "folder on a larger disk."
        )
    names = _missing(model_name, info, sizes, patterns)
    if names:
        size = sum(sizes[name] for name in names)
        waiting = ""
        if os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
            waiting = "; this machine's other ranks wait"
        log.info(
            "Downloading %s: %d files, %.2f GiB, to %s%s.",
            model_name,
            len(names),
            size / 2**30,
            folder,
            waiting,
        )


def _missing(
    model_name: str, info: ModelInfo, names: Iterable[str], patterns: list[str]
) -> list[str]:
    """The files that match `patterns` and are not in the hub's cache."""
    names = filter_repo_objects(names, allow_patterns=patterns, ignore_patterns=_NOT_NEEDED)
    return [
        name
        for name in names
        if not isinstance(try_to_load_from_cache(model_name, name, revision=info.sha), str)
    ]


def public_name(model_name: str) -> str:
    """A model's name for publication: its name on the hub, or its folder's without the path."""
    folder = Path(model_name).expanduser()
    if not folder.is_dir():
        return model_name
    for part in folder.resolve().parts:
        if part.startswith("models--"):  # the hub's cache: models--owner--name/snapshots/commit
            return part.removeprefix("models--").replace("--", "/", 1)
    return folder.resolve().name
