"""Make a tiny random model for images and text (gemma3), and 400 questions about the colour of a
square.

python examples/images/make.py runs/squares
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3Processor,
    PreTrainedTokenizerFast,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (40, 80, 220),
    "yellow": (230, 210, 40),
}
QUESTION = "What colour is the square?"
TOKENS = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}:\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ "
    "'<start_of_image>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}{{ "
    "eos_token if m.role == 'assistant' }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:\n"
    "{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(
        [f"user:\n{QUESTION}\nassistant:\n{color}" for color in COLORS] * 2, trainer
    )
    options = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
        "chat_template": TEMPLATE,
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, extra_special_tokens=TOKENS, **options
    )


def make_model(folder: Path) -> None:
    """Two blocks of width 64 behind a tower of two: the program trains the blocks, the tower stays
    as it is.
    """
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in TOKENS.items()}
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    text = sizes | {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": len(tokenizer),
        "initializer_range": 0.1,
    }
    config = Gemma3Config(
        text_config=text | {"max_position_embeddings": 256},
        vision_config=sizes | {"image_size": 28, "patch_size": 14, "initializer_range": 0.1},
        mm_tokens_per_image=4,
        image_token_index=ids["image_token"],
        boi_token_index=ids["boi_token"],
        eoi_token_index=ids["eoi_token"],
    )
    model = Gemma3ForConditionalGeneration(config)
    # zero in a new model
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.2)
    model.save_pretrained(folder)
    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    Gemma3Processor(images, tokenizer, image_seq_length=4).save_pretrained(folder)


def make_rows(folder: Path) -> None:
    """Squares of four colours, no two alike, on a grey of its own.

    rows.jsonl has their colours, guesses.jsonl a colour at random for each, pairs.jsonl the right
    colour beside another one, and questions.jsonl the right one in a column for a reward function.
    """
    numbers = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[dict[str, Any]]] = {
        "rows": [],
        "guesses": [],
        "pairs": [],
        "questions": [],
    }
    for number in range(400):
        color = draw_square(folder / f"{number}.png", numbers)
        # not from `numbers`: squares stay the same
        guesses = random.Random(number)
        other = guesses.choice([each for each in sorted(COLORS) if each != color])
        question = {"role": "user", "content": f"<image>{QUESTION}"}
        images = {"images": [f"{number}.png"]}
        rows["rows"].append(images | {"messages": [question, said(color)]})
        guess = guesses.choice(sorted(COLORS))
        rows["guesses"].append(images | {"messages": [question, said(guess)]})
        pair = {"prompt": [question], "chosen": [said(color)], "rejected": [said(other)]}
        rows["pairs"].append(images | pair)
        rows["questions"].append(images | {"prompt": [question], "color": color})
    for name, made in rows.items():
        lines = [json.dumps(row) + "\n" for row in made]
        (folder / f"{name}.jsonl").write_text("".join(lines))


def draw_square(path: Path, numbers: random.Random) -> str:
    """Save the image of a square. Returns its colour."""
    color, channels = numbers.choice(sorted(COLORS.items()))
    image = Image.new("RGB", (56, 56), (numbers.randrange(256),) * 3)
    square = tuple(min(255, max(0, channel + numbers.randrange(-25, 26))) for channel in channels)
    image.paste(square, (numbers.randrange(16), numbers.randrange(16), 44, 44))
    image.save(path)
    return color


def said(color: str) -> dict[str, str]:
    """A colour as the model's turn."""
    return {"role": "assistant", "content": color}


if __name__ == "__main__":
    make_rows(Path(sys.argv[1]))
    make_model(Path(sys.argv[1]) / "model")
