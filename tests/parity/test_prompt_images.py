"""Models whose prompts with images are seen in both directions train as in a plain loop of
transformers' processor and model with PEFT's adapter.
"""

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PaliGemmaProcessor,
)

from fsdp_qlora.__main__ import main
from tests.helpers.metrics import read_metrics
from tests.helpers.reference import LINEARS, answer_logps, load_base, train_on_loss
from tests.helpers.rows import write_rows
from tests.helpers.run import flags, train_ok
from tests.parity.test_image_rows import siglip_images
from tests.parity.test_images import LORA, OPTIONS, check_as_plain, picture, png, save_tokenizer
from tests.parity.test_multimodal import make_multimodal
from tests.parity.test_tower_adapters import fill_zeros

if hasattr(AutoImageProcessor, "_backends"):
    pytest.skip(
        "images need torchvision with this release of transformers", allow_module_level=True
    )
STEPS = 4
TOWER = "model.vision_tower.*(q_proj|k_proj|v_proj|out_proj|fc1|fc2)"
PROJECTOR = "model.multi_modal_projector.linear"
DOCS = Path(__file__).parents[2] / "docs/models.md"
[TEMPLATE] = re.findall(r"```jinja\n(.*?)```", DOCS.read_text(), re.DOTALL)
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
PAIRS = [(shown, said[:2]) for shown, said in ROWS]
WORSE = "red seven list"
DATASETS = {"rows.jsonl": ROWS, "instructions.jsonl": PAIRS}


def images() -> list[Any]:
    return [picture(40 + 9 * n, 60 - 5 * n, seed=n) for n in range(6)]


def turns(*said: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]


def columns_of(shown: list[int]) -> dict[str, Any]:
    return {"images": [f"{number}.png" for number in shown]} if shown else {}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def make(text: str) -> Path:
        return make_folder(tmp_path_factory.mktemp(f"with_{text}"), text)

    return make


def make_folder(folder: Path, text: str) -> Path:
    """A tiny model with its processor, a chat template, and rows. text: the family of its text."""
    make_multimodal(folder, "paligemma", text)
    fill_zeros(folder)
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
    rows = [columns_of(shown) | {"messages": turns(*said)} for shown, said in ROWS]
    write_rows(folder / "rows.jsonl", rows)
    rows = [
        columns_of(shown)
        | {"prompt": turns(said[0]), "chosen": turns(*said)[1:], "rejected": turns("", WORSE)[1:]}
        for shown, said in PAIRS
    ]
    write_rows(folder / "pairs.jsonl", rows)
    rows = [
        columns_of(shown) | {"instruction": said[0], "output": said[1]} for shown, said in PAIRS
    ]
    write_rows(folder / "instructions.jsonl", rows)
    return folder


class Encoder:
    """transformers' processor and tokenizer, as a row's inputs and labels."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._processor = PaliGemmaProcessor(
            AutoImageProcessor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        )
        self._images = images()

    def row(self, shown: list[int], said: list[str]) -> dict[str, torch.Tensor]:
        return self._with_images(shown, said) if shown else self._text(*said)

    def _with_images(self, shown: list[int], said: list[str]) -> dict[str, torch.Tensor]:
        question, answer, *more = said
        # What follows the first answer is causal, and a second question is not learned.
        suffix = f"{answer}</s>{more[0]}\n{more[1]}" if more else answer
        inputs = dict(
            self._processor(
                text=["<image>" * len(shown) + question],
                images=[[self._images[number] for number in shown]],
                suffix=[suffix],
                return_tensors="pt",
            )
        )
        if more:
            start = int((inputs["token_type_ids"] == 0).sum()) + len(self._ids(f"{answer}</s>"))
            inputs["labels"][:, start : start + len(self._ids(f"{more[0]}\n"))] = -100
        return inputs

    def _text(self, question: str, answer: str) -> dict[str, torch.Tensor]:
        ids = torch.tensor([self._ids(f"<s>{question}\n{answer}</s>")])
        labels = ids.clone()
        labels[:, : len(self._ids(f"<s>{question}\n"))] = -100
        return {"input_ids": ids, "labels": labels}

    def _ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return found


@functools.cache
def plain(
    folder: Path, dataset: str, lora: str = LORA
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """A plain loop of PEFT."""
    encoder = Encoder(folder)
    batches = [encoder.row(*row) for row in DATASETS[dataset]]
    count = sum(int((batch["labels"][0, 1:] != -100).sum()) for batch in batches)

    def loss_of(model: torch.nn.Module) -> torch.Tensor:
        return -torch.stack([answer_logps(model, batch).sum() for batch in batches]).sum() / count

    base = load_base(folder, four_bit=False, auto=AutoModelForImageTextToText)
    return train_on_loss(base, loss_of, lora, steps=STEPS)


@functools.cache
def plain_dpo(folder: Path) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """The same on the loss of Rafailov et al. 2023, eq. 7."""
    encoder = Encoder(folder)
    sides = [
        [encoder.row(shown, [question, each]) for each in (answer, WORSE)]
        for shown, (question, answer) in PAIRS
    ]

    def ratio(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad(), model.disable_adapter():
            reference = answer_logps(model, batch).sum()
        return answer_logps(model, batch).sum() - reference

    def loss_of(model: torch.nn.Module) -> torch.Tensor:
        margins = [ratio(model, chosen) - ratio(model, rejected) for chosen, rejected in sides]
        return -F.logsigmoid(0.1 * torch.stack(margins)).mean()

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
    ("text", "ranks", "dataset"),
    [
        ("gemma", 1, "rows.jsonl"),
        # Text alone is padding-free, and one of two layers sees a window.
        pytest.param("gemma2", 2, "instructions.jsonl", marks=pytest.mark.slow),
        pytest.param("gemma", 2, "instructions.jsonl", marks=pytest.mark.nightly),
        pytest.param("gemma2", 1, "rows.jsonl", marks=pytest.mark.nightly),
    ],
)
def test_prompts_seen_in_both_directions_train_as_with_peft(
    text, ranks, dataset, folders, tmp_path
):
    folder = folders(text)
    options = run(folder) | {"dataset": folder / dataset}
    sizes = {"batch_size": 2, "gradient_accumulation_steps": 4 // ranks}
    output = train_ok(ranks, tmp_path / "out", **options, **sizes)
    check_as_plain(tmp_path / "out", plain(folder, dataset))
    assert "Rows are padded with this model" in output
    train_ok(ranks, tmp_path / "bf16", **options | {"precision": "bf16"}, **sizes)
    losses = [read_metrics(tmp_path / name) for name in ("out", "bf16")]
    # bf16 has 8 bits
    assert losses[1] == pytest.approx(losses[0], rel=2e-2) and losses[0] != losses[1]


@pytest.mark.slow
def test_adapters_for_images_of_such_prompts_train_as_with_peft(folders, tmp_path):
    folder = folders("gemma")
    options = run(folder) | {"lora_target_modules": "all,vision,projector"}
    train_ok(2, tmp_path / "out", **options, batch_size=2, gradient_accumulation_steps=2)
    expected = plain(folder, "rows.jsonl", f"{LORA}|{TOWER}|{PROJECTOR}")
    check_as_plain(tmp_path / "out", expected)


@pytest.mark.slow
def test_pairs_with_prompts_seen_in_both_directions_train_as_with_peft(folders, tmp_path):
    folder = folders("gemma")
    options = run(folder) | {"objective": "dpo", "dataset": folder / "pairs.jsonl"}
    train_ok(2, tmp_path / "out", **options, batch_size=2, gradient_accumulation_steps=2)
    check_as_plain(tmp_path / "out", plain_dpo(folder))


@pytest.mark.parametrize("command", ["generate", "train"])
def test_answers_to_such_prompts_are_refused_before_weights_are_read(
    command, folders, tmp_path, capsys
):
    folder = tmp_path / "model"
    folder.mkdir()
    for path in folders("gemma").iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).symlink_to(path)
    prompts = write_rows(folder / "prompts.jsonl", [columns_of([0]) | {"prompt": "name it"}])
    (folder / "reward.py").write_text("def one(completions, **_): return [1.0] * len(completions)")
    options = {"model_name": folder, "prompt_template": folder / "prompt.jinja"}
    if command == "generate":
        options |= {"prompts": prompts, "out": tmp_path / "out.jsonl"}
    else:
        options |= {"dataset": prompts, "output_dir": tmp_path / "out", "objective": "grpo"}
        options |= {"rewards": f"{folder / 'reward.py'}:one"}
    assert main([command, *flags(**options), "--nproc_per_node", "1"]) != 0
    assert "answers to such prompts cannot be sampled here" in capsys.readouterr().err
