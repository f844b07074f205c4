"""Models whose prompts with images are seen in both directions train as in a plain loop of
transformers' processor and model with PEFT's adapter.
"""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PaliGemmaProcessor,
)

from tests.helpers.metrics import read_metrics
from tests.helpers.reference import LINEARS, answer_logps, load_base, train_on_loss
from tests.helpers.rows import write_rows
from tests.helpers.run import train_ok
from tests.parity.test_image_rows import siglip_images
from tests.parity.test_images import LORA, OPTIONS, check_as_plain, picture, png, save_tokenizer
from tests.parity.test_multimodal import make_multimodal

if hasattr(AutoImageProcessor, "_backends"):
    pytest.skip(
        "images need torchvision with this release of transformers", allow_module_level=True
    )
STEPS = 4
# As in docs/models.md.
TEMPLATE = """\
{%- for message in messages -%}
  {%- set parts = message.content -%}
  {%- if parts is string -%}{%- set parts = [{'type': 'text', 'text': parts}] -%}{%- endif -%}
  {%- for part in parts if part.type == 'image' -%}<image>{%- endfor -%}
  {%- if loop.first -%}{{ bos_token }}{%- endif -%}
  {%- for part in parts if part.type == 'text' -%}{{ part.text }}{%- endfor -%}
  {{- eos_token if message.role == 'assistant' else '\\n' -}}
{%- endfor -%}
"""
# Images of a row, and what is said in turn.
ROWS = [
    ([0], ["name it", "red river"]),
    ([1, 2], ["which number of them " * 4, "seven"]),
    ([], ["sort", "list name"]),
    ([3], ["please", "blue", "again", "red water"]),
    ([4], ["so", "river mountain answer question"]),
    ([], ["write seven words " * 3, "water"]),
    ([5], ["list water", "name"]),
    ([0], ["please again", "green"]),
]


def images() -> list[Any]:
    return [picture(40 + 9 * n, 60 - 5 * n, seed=n) for n in range(6)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def make(text: str) -> Path:
        return make_folder(tmp_path_factory.mktemp(f"with_{text}"), text)

    return make


def make_folder(folder: Path, text: str) -> Path:
    """A tiny model with its processor, a chat template, and rows. text: the family of its text."""
    make_multimodal(folder, "paligemma", text)
    save_tokenizer(folder, {"image_token": "<image>"}, "<image>")
    siglip_images().save_pretrained(folder)
    # Its configuration puts its own projection_dim in place of the vision tower's.
    settings = {"preprocessor_config": {"image_seq_length": 4}, "config": {"projection_dim": 64}}
    for name, more in settings.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | more))
    (folder / "prompt.jinja").write_text(TEMPLATE)
    for number, image in enumerate(images()):
        (folder / f"{number}.png").write_bytes(png(image))
    rows: list[dict[str, Any]] = []
    for shown, said in ROWS:
        files: dict[str, Any] = {"images": [f"{number}.png" for number in shown]}
        messages = [
            {"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)
        ]
        rows.append({"messages": messages} | (files if shown else {}))
    write_rows(folder / "rows.jsonl", rows)
    return folder


def encode(folder: Path) -> list[dict[str, torch.Tensor]]:
    """The processor's inputs and labels of each row; of text those of the tokenizer alone."""
    processor = PaliGemmaProcessor(
        AutoImageProcessor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    )
    pictures = images()
    encoded = []
    for shown, (question, answer, *more) in ROWS:
        if not shown:
            prompt, ids = (
                processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")
                for text in (f"<s>{question}\n", f"<s>{question}\n{answer}</s>")
            )
            labels = ids["input_ids"].clone()
            labels[:, : prompt["input_ids"].shape[1]] = -100
            encoded.append({"input_ids": ids["input_ids"], "labels": labels})
            continue
        # What follows the first answer is causal, and a second question is not learned.
        between = f"</s>{more[0]}\n" if more else ""
        inputs = dict(
            processor(
                text=["<image>" * len(shown) + question],
                images=[[pictures[number] for number in shown]],
                suffix=[answer + between + "".join(more[1:])],
                return_tensors="pt",
            )
        )
        if more:
            known, unlearned = (
                len(processor.tokenizer(text, add_special_tokens=False)["input_ids"])
                for text in (f"{answer}</s>", f"{more[0]}\n")
            )
            start = int((inputs["token_type_ids"] == 0).sum()) + known
            inputs["labels"][:, start : start + unlearned] = -100
        encoded.append(inputs)
    return encoded


@functools.cache
def plain(folder: Path) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """A plain loop of PEFT."""
    batches = encode(folder)
    count = sum(int((batch["labels"][0, 1:] != -100).sum()) for batch in batches)

    def loss_of(model: torch.nn.Module) -> torch.Tensor:
        return -torch.stack([answer_logps(model, batch).sum() for batch in batches]).sum() / count

    base = load_base(folder, four_bit=False, auto=AutoModelForImageTextToText)
    return train_on_loss(base, loss_of, LORA, steps=STEPS)


def run(folder: Path) -> dict[str, Any]:
    return OPTIONS | {
        "model_name": folder,
        "dataset": folder / "rows.jsonl",
        "prompt_template": folder / "prompt.jinja",
        "num_epochs": STEPS,
        "lora_target_modules": ",".join(LINEARS),
    }


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("gemma", 1),
        # Text alone is padding-free, and one of two layers sees a window.
        pytest.param("gemma2", 2, marks=pytest.mark.slow),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in (("gemma", 2), ("gemma2", 1))),
    ],
)
def test_prompts_seen_in_both_directions_train_as_with_peft(text, ranks, folders, tmp_path):
    folder = folders(text)
    sizes = {"batch_size": 2, "gradient_accumulation_steps": 4 // ranks}
    output = train_ok(ranks, tmp_path / "out", **run(folder), **sizes)
    check_as_plain(tmp_path / "out", plain(folder))
    assert "Rows are padded with this model" in output
    bits = run(folder) | {"precision": "bf16"}
    train_ok(ranks, tmp_path / "bf16", **bits, **sizes)
    losses = [read_metrics(tmp_path / name) for name in ("out", "bf16")]
    # bf16 has 8 bits
    assert losses[1] == pytest.approx(losses[0], rel=2e-2) and losses[0] != losses[1]
