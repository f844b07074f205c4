"""A tiny model that calls tools, an environment, and scripted turns of the model in it."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.helpers.models import make_model
from tests.helpers.rows import write_rows
from tests.helpers.tokenizers import WORDS

TEMPLATE = (
    Path(__file__).parents[1] / "rollouts" / "chat_templates" / "qwen3_training.jinja"
).read_text()
ENVIRONMENT = '''
class Shelf:
    def reset(self, start, **row):
        self.seen = start
        return f" Begin at {start}."

    def look(self, word: str, times: int = 1) -> str:
        """
        Look at a word.

        Args:
            word: The word to look at.
            times: How often.
        """
        self.seen += times
        return " ".join([word] * times)

    def fail(self, reason: str) -> str:
        """
        Fail.

        Args:
            reason: Why.
        """
        raise ValueError(f"no {reason}")

    def get_reward(self):
        return self.seen / 10
'''
STEPS = 4
PROMPTS = 2
ANSWERS = 3
LONGEST = 400
LR = 0.3


def make_agent(folder: Path, **sizes: Any) -> Path:
    """A random qwen3 with Qwen's tokens for turns and tools, and the template of Qwen3."""
    make_model(folder, "qwen3", **{"max_position_embeddings": 2048, "eos_token_id": 1, **sizes})
    tokenizer = Tokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=314,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def write_inputs(folder: Path) -> tuple[Path, Path]:
    """The file of the environment, and rows for it."""
    environment = folder / "shelf.py"
    environment.write_text(ENVIRONMENT)
    rows: list[dict[str, Any]] = [
        {"prompt": [{"role": "user", "content": f"sort {number}"}], "start": number}
        for number in range(PROMPTS)
    ]
    return environment, write_rows(folder / "rows.jsonl", rows)


def call(name: str, **arguments: Any) -> str:
    content = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{content}\n</tool_call>"


def scripted(generation: int, place: int, turn: int) -> str:
    """The text of a turn. Most episodes call tools in the first one, and some in the second."""
    word = WORDS[(3 * generation + 5 * place + turn) % len(WORDS)]
    kind = (generation + place) % 6
    if turn == 0 and kind == 1:
        return f"answer {word}"
    if turn == 0 and kind == 2:
        return f"please {word}\n" + call("look", word=word, times=place + 1)
    if turn == 0 and kind == 3:
        return call("look", word=word) + "\n" + call("look", word="blue", times=2)
    if turn == 0 and kind == 4:
        return call("fail", reason=word)
    if turn == 0 and kind == 5:
        return call("unknown", word=word)
    if turn == 0 or (turn == 1 and kind == 2):
        return call("look", word=word)
    return f"answer {word} {generation}"


def token_ids(folder: Path, text: str) -> list[int]:
    """The tokens of a turn, with the one that ends it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids: list[int] = tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"]
    return ids


def digest(numbers: Iterable[int]) -> str:
    """A hash of whole numbers."""
    return hashlib.sha256(json.dumps([int(number) for number in numbers]).encode()).hexdigest()
