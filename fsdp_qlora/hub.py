"""Models and datasets on the Hugging Face hub: whether it answers, why not, and a model's files."""

import logging
import re
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

from fsdp_qlora.errors import UserError

log = logging.getLogger("fsdp_qlora")

HUB_TIMEOUT_SECONDS = 10
# Copies of the weights in other layouts, which some repositories hold beside the usual files.
_NOT_NEEDED = ["consolidated*", "*/*"]
SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]

# The first row that fits an error is taken.
_REASONS: dict[type[Exception], str] = {
    GatedRepoError: "on the hub it is gated: accept its terms on its page there, then log in with `hf auth login` "
    "or set HF_TOKEN",
    RepositoryNotFoundError: "the hub has none of this name that this login may see: check the spelling, or set "
    "HF_TOKEN if it is private",
    HFValidationError: "no name on the hub is written like this",
}


def is_hub_name(name: str) -> bool:
    """Whether a word has the form owner/name and does not look like a path to a file."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is not None and not re.search(r"\.[A-Za-z]\w*$", name)


def ask_hub(name: str, repo_type: str) -> Exception | None:
    """Ask once, and for seconds at most, whether a model or dataset is there.

    The hub's own downloads retry for 20 s without DNS, and wait for ever behind a silent firewall.

    Returns:
        None where it is, else the error, which `hub_reason` puts into words.
    """
    try:
        HfApi().repo_info(name, repo_type=repo_type, timeout=HUB_TIMEOUT_SECONDS)
    except Exception as error:  # of the HTTP library, which has changed, or of the hub's client
        return error
    return None


def hub_reason(error: Exception) -> str:
    """The middle of a sentence: why a model or dataset cannot be had from the hub."""
    for kind, reason in _REASONS.items():
        if isinstance(error, kind):
            return reason
    return f"the Hugging Face hub is out of reach ({first_line(error)})"


def first_line(error: Exception) -> str:
    """An error's type and the first line of its text."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def find_model_folder(model_name: str, *, with_weights: bool, with_code: bool = False) -> Path:
    """The local folder of a model: the given one, or the hub's snapshot, downloaded when it is not there.

    Raises:
        UserError: there is no such model, it needs a licence click, or the hub is out of reach.
    """
    folder = Path(model_name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError(f"model_name {model_name} is a file. Give the model's folder.")
    if model_name.startswith((".", "/", "~")) or model_name.count("/") > 1:
        raise UserError(f"model_name {model_name}: there is no such folder. Check the path, or give a name on the hub.")
    refusal = ask_hub(model_name, "model")
    if refusal is not None:
        log.info("%s is looked for among the copies on this machine: %s.", model_name, hub_reason(refusal))
    patterns = [*SMALL_FILES, *["*.safetensors"] * with_weights, *["*.py"] * with_code]
    try:
        return Path(
            snapshot_download(
                model_name, allow_patterns=patterns, ignore_patterns=_NOT_NEEDED, local_files_only=refusal is not None
            )
        )
    except Exception as error:  # of the HTTP library, the hub's client or the file system
        reason = hub_reason(refusal) if refusal else f"its download failed ({first_line(error)})"
        raise UserError(
            f"model_name {model_name}: there is no such local folder, and {reason}. Without the hub, give the "
            "path of a model folder, or make one with `python scripts/demo_model.py --output_dir demo/model`."
        ) from error


def public_name(model_name: str) -> str:
    """A model's name for others: that of the hub, or the folder's own, without the path that leads to it here."""
    folder = Path(model_name).expanduser()
    if not folder.is_dir():
        return model_name
    for part in folder.resolve().parts:
        if part.startswith("models--"):  # the hub's cache: models--owner--name/snapshots/commit
            return part.removeprefix("models--").replace("--", "/", 1)
    return folder.resolve().name
