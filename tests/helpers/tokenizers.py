"""Small tokenizers, made in code."""

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

WORDS = [
    "sort",
    "list",
    "name",
    "river",
    "number",
    "colour",
    "blue",
    "red",
    "green",
    "seven",
    "water",
    "mountain",
    "answer",
    "question",
    "please",
    "write",
]


def make_tokenizer(folder: Path) -> None:
    """Byte-level BPE with <s> in front of every text, an </s>, and no pad token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)


TEKKEN_WORDS = (  # the pattern of its tekken.json
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# of `spelled_tokenizer`
MERGES = [("h", "i"), ("g", "o"), ("{blank}", "o"), ("{blank}o", "n"), ("n", "o"), ("s", "o")]


def spelled_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens can be told by hand: letters, and `hi`, `go`, ` on`, `no`, `so`.

    Args:
        kind: "byte_level" (GPT-2's, Llama 3's, Qwen's), "sentencepiece" (Llama 2's, Mistral's of
            2023) or "tekken" (Mistral's later ones), in which a word may begin with a sign, as
            `:go` does.
    """
    blank = "▁" if kind == "sentencepiece" else "Ġ"
    merges = [(a.format(blank=blank), b) for a, b in MERGES]
    merges += [(":", "go")] if kind == "tekken" else []
    is_bytes = kind != "sentencepiece"
    letters = (
        pre_tokenizers.ByteLevel.alphabet()
        if is_bytes
        else [blank, "\n", *map(chr, range(33, 127))]
    )
    tokens = ["<s>", "</s>", *sorted(letters), *(a + b for a, b in merges)]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    if is_bytes:
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != "tekken")
        words = pre_tokenizers.Split(Regex(TEKKEN_WORDS), "isolated")
        backend.pre_tokenizer = (
            pre_tokenizers.Sequence([words, plain]) if kind == "tekken" else plain
        )
        backend.decoder = decoders.ByteLevel()
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
        backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens(
        ["<s>", "</s>", *(["[INST]", "[/INST]"] if kind == "tekken" else [])]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
