"""Whether a text that is given as a folder of this machine means a place elsewhere: a URL, or a remote of rclone.

What is refused is named by how it begins alone: the rest may hold a password.
"""

import os
import re

_FORMS = "rclone:REMOTE:PATH (a remote of rclone), hf:OWNER/NAME (a repository on the Hugging Face hub)"
_COLON = "A folder with a colon in its name is given as ./NAME."


def mirror_error(target: str) -> str | None:
    """Why --mirror is no place for copies; None where it may be one."""
    kind, _, rest = target.partition(":")
    if kind == "rclone":
        return None if ":" in rest else "--mirror rclone:REMOTE:PATH needs a remote's name, which ends with a colon."
    if kind == "hf":
        is_repository = re.fullmatch(r"[\w.-]+/[\w.-]+", rest)
        return None if is_repository else "--mirror hf:OWNER/NAME needs a repository's name with its owner."
    if (begin := _remote(target)) is None:
        return None
    return f"--mirror begins with {begin!r}, which is no kind of mirror. Give {_FORMS} or a folder. {_COLON}"


def folder_error(option: str, text: str) -> str | None:
    """Why an option that is a folder of this machine cannot be `text`; None where it may."""
    begin = _remote(text)
    # One with a colon in its name may be there already, unless it is what an earlier version made of a URL.
    if begin is None or (os.path.exists(text) and not begin.startswith(":") and not begin.endswith("/")):
        return None
    return (
        f"--{option} begins with {begin!r}, but must be a folder of this machine. Copies elsewhere are made by "
        f"--mirror: {_FORMS}. {_COLON}"
    )


def _remote(text: str) -> str | None:
    """How a URL or a remote begins (s3://, :sftp, box:), None for a path: it has no colon before its first slash."""
    match = re.match(r"(:?[^:/,@]*)[^/]*?:(/{0,2})", text)
    if match is None:
        return None
    return match[1] + ":" * (not match[1].startswith(":")) + match[2]
