"""A tokenizer as llama.cpp reads it from a GGUF file: byte-level BPE, or BPE made of a SentencePiece model."""

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gguf import GGUFWriter, SpecialVocab, TokenType

from fsdp_qlora.errors import UserError

ADVICE = "Give llama.cpp's folder in --llama_cpp: its own converter knows more."
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How a text is split into words before BPE (llama.cpp's llama-vocab.cpp) -> llama.cpp's name of it.
_REGEX_NAMES = {_WORDS % "{1,3}": "llama-bpe", _WORDS % "": "qwen2"}


class Vocabulary(NamedTuple):
    """kind and splits: llama.cpp's names of the algorithm and of how words are split. tokens, types and scores by id.

    merges: "a b", of byte-level BPE; scores: of SentencePiece. puts_space_first: a text begins with a space.
    """

    kind: str
    splits: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float]
    puts_space_first: bool


def read_vocabulary(folder: Path, size: int) -> Vocabulary:
    """The tokenizer of a model folder.

    Args:
        size: rows of the model's embeddings; ids without a token are filled up.
    Raises:
        UserError: it is no BPE, or splits words in a way that is not known here.
    """
    try:
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--model {folder} has no tokenizer.json that can be read ({error}). {ADVICE}") from error
    model = content["model"]
    is_sentencepiece = bool(model.get("byte_fallback"))
    splits = "default" if is_sentencepiece else _splits(content.get("pre_tokenizer") or {})
    if model.get("type") != "BPE" or splits is None:
        raise UserError(f"--model {folder}: its tokenizer is no BPE of a kind known here. {ADVICE}")
    tokens = {index: token for token, index in model["vocab"].items()}
    types = {index: _type_of(token, model) for index, token in tokens.items()}
    for added in content.get("added_tokens", []):
        tokens[added["id"]] = added["content"]
        if types.get(added["id"]) != TokenType.UNKNOWN:
            types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    merges = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"]]
    # SentencePiece merges the pair whose token has the highest score, BPE the pair of the lowest rank.
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    ids = range(max(size, *(index + 1 for index in tokens)))
    return Vocabulary(
        kind="llama" if is_sentencepiece else "gpt2",
        splits=splits,
        tokens=[tokens.get(index, f"[PAD{index}]") for index in ids],
        types=[int(types.get(index, TokenType.UNUSED)) for index in ids],
        merges=[] if is_sentencepiece else [" ".join(pair) for pair in merges],
        scores=[-float(ranks.get(tokens.get(index, ""), len(merges))) for index in ids] if is_sentencepiece else [],
        puts_space_first=_puts_space_first(content),
    )


def _type_of(token: str, model: Mapping[str, Any]) -> TokenType:
    if token == model.get("unk_token"):
        return TokenType.UNKNOWN
    return (
        TokenType.BYTE if model.get("byte_fallback") and re.fullmatch(r"<0x[0-9A-F]{2}>", token) else TokenType.NORMAL
    )


def _splits(pre_tokenizer: Mapping[str, Any]) -> str | None:
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = [step.get("type") for step in steps]
    if not kinds or kinds[-1] != "ByteLevel":
        return None
    if kinds == ["ByteLevel"]:
        return "gpt-2" if steps[0].get("use_regex", True) else None
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        return _REGEX_NAMES.get(steps[0]["pattern"].get("Regex", ""))
    return None


def _puts_space_first(content: Mapping[str, Any]) -> bool:
    normalizer, splitter = content.get("normalizer") or {}, content.get("pre_tokenizer") or {}
    prepends = any(step.get("type") == "Prepend" for step in normalizer.get("normalizers", [normalizer]))
    return prepends or splitter.get("prepend_scheme") in ("first", "always")


def add_tokenizer(writer: GGUFWriter, folder: Path, vocabulary: Vocabulary) -> None:
    """Write the tokenizer's keys, with its special tokens and chat template."""
    writer.add_tokenizer_model(vocabulary.kind)
    writer.add_tokenizer_pre(vocabulary.splits)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.puts_space_first)
    logging.getLogger("gguf.vocab").setLevel(logging.ERROR)  # it warns of templates for pairs of texts
    special = SpecialVocab(folder, n_vocab=len(vocabulary.tokens))
    special.merges = vocabulary.merges
    special.add_to_gguf(writer, quiet=True)
