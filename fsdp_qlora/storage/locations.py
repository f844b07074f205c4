"""Recognizes URLs and rclone remotes where a folder of this machine is expected.

Messages show only the beginning of a refused value: the rest may contain a password.
"""

import os
import re

_URLS = ("s3", "gcs", "gs", "az", "sftp")  # of those that fsspec opens, which can be written to
_FORMS = (
    f"{', '.join(f'{kind}://' for kind in _URLS)}, hf:OWNER/NAME (a repository on the Hugging Face hub), "
    "rclone:REMOTE:PATH (a remote of rclone)"
)
_COLON = "A folder with a colon in its name is given as ./NAME."


def mirror_error(target: str) -> str | None:
    """Why --mirror cannot be used; None if it may be."""
    kind, _, rest = target.partition(":")
    if kind == "rclone":
        return None if ":" in rest else "--mirror rclone:REMOTE:PATH needs a remote's name, which ends with a colon."
    if kind == "hf":
        is_named = is_repository(rest.removeprefix("//"))
        return None if is_named else "--mirror hf:OWNER/NAME needs a repository's name with its owner."
    if kind in _URLS and re.match("//[^/]", rest):
        return None
    if (begin := _remote(target)) is None:
        return None
    return f"--mirror begins with {begin!r}, which is not a kind of mirror. Give {_FORMS} or a folder. {_COLON}"


def is_repository(name: str) -> bool:
    """Whether this is a repository's name on the hub, OWNER/NAME."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None


def folder_error(option: str, text: str) -> str | None:
    """Why an option that names a folder of this machine cannot be `text`; None if it may be."""
    begin = _remote(text)
    # A folder with a colon in its name may exist, but not one that an earlier version created from a URL.
    if begin is None or (os.path.exists(text) and not begin.startswith(":") and not begin.endswith("/")):
        return None
    return (
        f"--{option} begins with {begin!r}, but must be a folder of this machine. For copies elsewhere use --mirror: "
        f"{_FORMS}. {_COLON}"
    )


def _remote(text: str) -> str | None:
    """The beginning of a URL or remote (s3://, :sftp, box:); None for a path, without a colon before a slash."""
    if ":" not in text.partition("/")[0]:
        return None
    match = re.match(r"(:?[^:/,@]*)[^/]*?:(/{0,2})", text)
    assert match is not None
    return match[1] + ":" * (not match[1].startswith(":")) + match[2]
