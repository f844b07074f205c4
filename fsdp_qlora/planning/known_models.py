"""Sizes of well-known models, so that a plan needs no network, and spellings of their names."""

import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from fsdp_qlora.utils.hub import is_hub_name

# The configs of well-known models by name. A text is another name of the same model.
KNOWN_MODELS: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("known_models.yaml").read_text()
)
_SUFFIXES = re.compile(r"(-(instruct|base|hf|chat|it|pt|thinking|fp8|bf16|v0\.\d|\d{4}))+$")
_UPPER = {"fp8": "FP8", "bf16": "BF16"}
_AS_THEY_ARE = ("hf", "it", "pt", "chat")
_SIZE = re.compile(r"(?:\d+x)?[ae]?\d+(?:\.\d+)?[bmt]|\d+e")  # 8b, 8x7b, a3b, e4b, 135m, 1t, 16e
_UNITS = {"m": 0, "b": 1, "t": 2}
_WORD = re.compile(r"[a-z]+|\d+(?:\.\d+)*")
# Models of the very version that is asked for: with fewer, its minor versions are named, too.
_FEW = 4
_ALIKE = 0.6  # of difflib: how much of a family's name a wrong one must have


def known_sizes(name: str) -> Mapping[str, Any] | None:
    """A well-known model's settings by its name, with or without owner and suffix, or None."""
    entry = _entry(name)
    # A model that is another one trained further has a name of its own on the hub, and the same
    # sizes.
    if entry is not None and "sizes_of" in entry:
        sizes: Mapping[str, Any] = KNOWN_MODELS[entry["sizes_of"]]
        return sizes
    return entry


def hub_name(name: str) -> str:
    """The name on the hub, with its owner, of a well-known model; other names as they are."""
    entry = None if is_hub_name(name) else _entry(name)
    if entry is None:
        return name
    plain = name.lower()
    hub = str(entry["hub"])
    owner, _, published = hub.partition("/")
    stem = _SUFFIXES.sub("", plain)
    if stem == plain or _letters(plain) in _NAMES:
        return hub
    if name != plain:  # written as on the hub
        return f"{owner}/{name}"
    # The table has one of a family's models, such as the instructed one. Another suffix is put on
    # the part of its name before the suffixes, which the owner writes in upper and lower case.
    suffixes = plain[len(stem) + 1 :].split("-")
    same = published[: len(_SUFFIXES.sub("", published.lower()))]
    return "-".join([f"{owner}/{same}", *map(_as_published, suffixes)])


def _as_published(suffix: str) -> str:
    """A suffix as most names on the hub write it: v0.2 and 2507 as they are, Instruct, FP8."""
    if suffix in _AS_THEY_ARE or suffix.startswith("v"):
        return suffix
    return _UPPER.get(suffix, suffix.capitalize())


def _entry(name: str) -> Mapping[str, Any] | None:
    """The table's entry of a model's name, with or without owner and suffix."""
    plain = name.lower().rpartition("/")[2].replace("meta-", "")
    # With the suffix first: some of the table's models have one in their own names.
    for letters in map(_letters, (plain, _SUFFIXES.sub("", plain))):
        if letters in _NAMES:
            entry = KNOWN_MODELS[_NAMES[letters]]
            if isinstance(entry, str):
                entry = KNOWN_MODELS[entry]
            sizes: Mapping[str, Any] = entry
            return sizes
    return None


def _letters(name: str) -> str:
    """A name without separators: some write llama-3.1-70b as llama3.1:70b."""
    return re.sub(r"[-_: ]", "", name)


def _hub_names() -> Iterator[tuple[str, str]]:
    """(a model's name on the hub without its owner, its name here)."""
    for name, entry in KNOWN_MODELS.items():
        if not isinstance(entry, str):
            yield entry["hub"].partition("/")[2].lower(), name


_NAMES = {_letters(published): name for published, name in _hub_names()}
_NAMES |= {_letters(name): name for name in KNOWN_MODELS}


# --- names that are nearly right ---


def names_near(name: str) -> list[str]:
    """The models of the family that a name means, by version and size; none if no family is near.

    A family is what precedes the size: gemma-4 of gemma-4-31b. A name in which there is no family
    is read as the nearest one, and then without its last words.
    """
    words = _words(_SUFFIXES.sub("", name.lower().rpartition("/")[2].replace("meta-", "")))
    families = {prefix for known in KNOWN_MODELS for prefix in _prefixes(_words(known))}
    while words:
        family = "".join(words)
        if family not in families:
            # sorted, so that equally near names are found in the same order in each process
            nearest = difflib.get_close_matches(family, sorted(families), n=1, cutoff=_ALIKE)
            family = nearest[0] if nearest else ""
        models = _family(family)
        if models:
            return models
        words.pop()
    return []


def _family(family: str) -> list[str]:
    """The models of a family, such as gemma4; for llama3 also llama3.1's if there are few."""
    prefixes = {
        name: [*_prefixes(_words(name))]
        for name, entry in KNOWN_MODELS.items()
        if not isinstance(entry, str)
    }
    models = sorted((name for name in prefixes if family in prefixes[name]), key=_order)
    if not family[-1:].isdigit() or len(models) >= _FEW:
        return models
    minor = [
        name
        for name in prefixes
        if any(prefix.startswith(f"{family}.") for prefix in prefixes[name])
    ]
    return models + sorted(minor, key=_order)


def _order(name: str) -> tuple[Any, ...]:
    """By the words of the family, numbers as numbers, then by size."""
    words = [(0, float(word), "") if word[0].isdigit() else (1, 0.0, word) for word in _words(name)]
    sizes = [
        (_UNITS[unit], float(number))
        for number, unit in re.findall(r"(\d+(?:\.\d+)?)([mbt])", name)
    ]
    return words, sizes


def _words(name: str) -> list[str]:
    """The words and numbers of a name without its sizes: qwen, 3, coder of Qwen3-Coder-30B-A3B."""
    parts = re.split(r"[-_: ]+", name)
    return [word for part in parts if not _SIZE.fullmatch(part) for word in _WORD.findall(part)]


def _prefixes(words: list[str]) -> Iterator[str]:
    """The first words of a name, written as one: qwen, qwen3, qwen3coder."""
    return ("".join(words[:count]) for count in range(1, len(words) + 1))


def trained_name(name: str) -> str:
    """The --model_name that trains a planned model: a folder, or the hub's name with its owner."""
    path = Path(name).expanduser()
    if path.is_file():  # a config.json
        return str(path.parent)
    return name if path.is_dir() else hub_name(name)
