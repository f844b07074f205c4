"""A byte-level BPE tokenizer as llama.cpp reads it from a GGUF file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gguf import GGUFWriter, TokenType

from fsdp_qlora.errors import UserError

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How a text is split into words before BPE (llama.cpp's llama-vocab.cpp) -> llama.cpp's name of it.
_REGEX_NAMES = {_WORDS % "{1,3}": "llama-bpe", _WORDS % "": "qwen2"}


class Vocabulary(NamedTuple):
    """tokens and their types by id; merges as "a b"; splits: llama.cpp's name of how words are split."""

    tokens: list[str]
    types: list[int]
    merges: list[str]
    splits: str


def read_vocabulary(folder: Path, size: int) -> Vocabulary:
    """The tokenizer of a model folder.

    Args:
        size: rows of the model's embeddings; ids without a token are filled up.
    Raises:
        UserError: it is no byte-level BPE, or splits words in a way that is not known here.
    """
    try:
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--model {folder} has no tokenizer.json that can be read ({error}). {ADVICE}") from error
    model = content["model"]
    if model.get("type") != "BPE" or (splits := _splits(content.get("pre_tokenizer") or {})) is None:
        raise UserError(f"--model {folder}: its tokenizer is no byte-level BPE of a kind known here. {ADVICE}")
    tokens = {index: token for token, index in model["vocab"].items()}
    types = dict.fromkeys(tokens, TokenType.NORMAL)
    for added in content.get("added_tokens", []):
        tokens[added["id"]] = added["content"]
        types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    ids = range(max(size, *tokens) if tokens else size)
    return Vocabulary(
        [tokens.get(index, f"[PAD{index}]") for index in ids],
        [int(types.get(index, TokenType.UNUSED)) for index in ids],
        merges,
        splits,
    )


ADVICE = "Give llama.cpp's folder in --llama_cpp: its own converter knows more."


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


def add_tokenizer(writer: GGUFWriter, folder: Path, vocabulary: Vocabulary) -> None:
    """Write the tokenizer's keys, with the chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.splits)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    for name in ("bos", "eos", "pad"):
        token = getattr(tokenizer, f"{name}_token_id")
        if token is not None and token < len(vocabulary.tokens):  # transformers gives some kinds a token of its own
            getattr(writer, f"add_{name}_token_id")(token)
    begins = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id] and tokenizer.bos_token_id is not None
    writer.add_add_bos_token(begins)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)
