"""The Hugging Face hub: whether it answers, and why not in words that help."""

import re

from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

HUB_TIMEOUT_SECONDS = 10

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
