"""Runs on prompts with images, and the same steps in a plain loop of transformers' processor and
model with PEFT's adapter.
"""

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from tests.helpers.metrics import read_metrics
from tests.helpers.reference import load_base
from tests.helpers.rows import read_rows, write_rows
from tests.parity.test_images import LORA, PROCESSORS, make_multimodal, picture, png
from tests.parity.test_tower_adapters import fill_zeros
from tests.rollouts.runs import rollouts_of

LR = 0.3
BETA = 0.05
STEPS = 4
OPTIONS: dict[str, Any] = {
    "objective": "grpo",
    "train_type": "lora",
    "precision": "fp32",
    "optimizer": "sgd",
    "lr": LR,
    "lr_scheduler": "constant",
    "num_generations": 4,
    "num_iterations": 2,
    "max_completion_length": 6,
    "context_length": 256,
    "beta": BETA,
    "max_steps": STEPS,
    "quant_cache": "off",
    "shuffle": False,
}
SCORE = """
def score(completions, images, **_):
    said = [sum(map(ord, answer[-1]["content"])) % 7 / 7 for answer in completions]
    return [value + len(shown) * shown[0].width / 100 if shown else value
            for value, shown in zip(said, images)]
"""
# How the tiny chat template shows an image.
SHOWN = {"qwen3_vl": "<|vision_start|><|image_pad|>", "gemma3": "<start_of_image>"}
QUESTIONS = [
    ("<image>name it<image>", [0, 1]),
    ("write seven words", []),
    ("<image>so?", [2]),
    ("what is <image>", [3]),
]


class Asked(NamedTuple):
    """A prompt as the processor gives it: its tokens, and the model's other arguments."""

    ids: list[int]
    others: Mapping[str, Any]


def make_folder(folder: Path, family: str, layers: str = LORA) -> Path:
    """A tiny model with its processor, an adapter to start from, prompts and a reward function.

    layers: with an adapter, a pattern of all of a path.
    """
    make_multimodal(folder, family)
    fill_zeros(folder)
    PROCESSORS[family](folder)
    for number, image in enumerate(_pictures()):
        (folder / f"{number}.png").write_bytes(png(image))
    rows = []
    for text, shown in QUESTIONS:
        images = [f"{number}.png" for number in shown]
        rows.append({"prompt": [{"role": "user", "content": text}], "images": images})
    write_rows(folder / "rows.jsonl", rows)
    (folder / "own.py").write_text(SCORE)
    base = AutoModelForImageTextToText.from_pretrained(folder)
    paths = [path for path, _ in base.named_modules() if re.fullmatch(layers, path)]
    config = LoraConfig(r=4, lora_alpha=32, target_modules=paths, task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.02
    model.save_pretrained(folder / "start")
    # PEFT shortens the paths, and a run takes names and patterns for the decoder's layers.
    file = folder / "start" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_modules": paths}))
    return folder


def options_of(folder: Path, **changes: Any) -> dict[str, Any]:
    options = {
        **OPTIONS,
        "model_name": folder,
        "adapter": folder / "start",
        "dataset": folder / "rows.jsonl",
        "rewards": f"{folder / 'own.py'}:score",
        **changes,
    }
    return {name: value for name, value in options.items() if value is not None}


def _pictures() -> list[Any]:
    return [picture(40 + 9 * number, 60 - 5 * number, seed=number) for number in range(4)]


@functools.cache
def asked(folder: Path, family: str, system: str = "") -> list[Asked]:
    """The processor's own tokens and arguments of each prompt."""
    before = f"system:\n{system}\n" if system else ""
    processor = PROCESSORS[family](folder)
    found = []
    for text, numbers in QUESTIONS:
        images = [_pictures()[number] for number in numbers]
        shown = text.replace("<image>", SHOWN[family])
        inputs = dict(
            processor(
                text=[f"<s>{before}user:\n{shown}\nassistant:\n"],
                images=[images] if images else None,
                add_special_tokens=False,
                return_tensors="pt",
            )
        )
        inputs.pop("attention_mask")
        found.append(Asked(inputs.pop("input_ids")[0].tolist(), inputs))
    return found


def _logits(model: Any, prompt: Asked, completion: list[int]) -> torch.Tensor:
    """The logits of a completion's tokens, [C, V]."""
    ids = torch.tensor([[*prompt.ids, *completion]])
    others = dict(prompt.others)
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in others:
            others[name] = torch.nn.functional.pad(others[name], (0, len(completion)))
    return model(input_ids=ids, **others).logits[0, len(prompt.ids) - 1 : -1]


def _logps(model: Any, prompt: Asked, completion: list[int]) -> torch.Tensor:
    spread = _logits(model, prompt, completion).log_softmax(dim=-1)
    return spread[torch.arange(len(completion)), completion]


def plain_steps(folder: Path, family: str, output: Path) -> tuple[list[float], list[float], Any]:
    """The losses, gradient norms and last adapter of steps on the answers of a run."""
    base = load_base(folder, four_bit=False, auto=AutoModelForImageTextToText)
    model = PeftModel.from_pretrained(base, folder / "start", is_trainable=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    begin = [parameter.detach().clone() for parameter in trained]
    prompts = asked(folder, family)
    losses = []
    norms = []
    for first in range(0, STEPS, 2):
        answers = [each for each in rollouts_of(output) if each["step"] == first + 1]
        pairs = [(prompts[each["row"] - 1], each["token_ids"]) for each in answers]
        assert [prompt.ids for prompt, _ in pairs] == [each["prompt_ids"] for each in answers]
        with torch.no_grad():
            old = [_logps(model, *pair) for pair in pairs]
            now = [parameter.clone() for parameter in trained]
            _set(trained, begin)
            reference = [_logps(model, *pair) for pair in pairs]
            _set(trained, now)
        for _ in range(2):
            loss = 0.0
            for number, pair in enumerate(pairs):
                gain = answers[number]["advantage"]
                logps = _logps(model, *pair)
                ratio = (logps - old[number]).exp()
                away = reference[number] - logps
                kl = ratio * (away.exp() - away - 1)
                clipped = ratio.clamp(0.8, 1.2) * gain
                loss = loss + (BETA * kl - torch.minimum(ratio * gain, clipped)).sum()
            loss = loss / sum(len(completion) for _, completion in pairs)
            _update(trained, loss, losses, norms)
    model.save_pretrained(output / "plain")
    return losses, norms, load_file(output / "plain" / "adapter_model.safetensors")


def _update(trained: list[Any], loss: Any, losses: list[float], norms: list[float]) -> None:
    """A step of SGD, which is noted."""
    loss.backward()
    losses.append(loss.item())
    norms.append(torch.nn.utils.clip_grad_norm_(trained, 1.0).item())
    with torch.no_grad():
        for parameter in trained:
            parameter -= LR * parameter.grad
            parameter.grad = None


def _set(parameters: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def numbers(output: Path) -> tuple[list[float], list[float], Any]:
    """The same of a run."""
    adapter = load_file(output / "adapter_model.safetensors")
    return read_metrics(output), read_metrics(output, "grad_norm"), adapter


# --- self-distillation ---

SYSTEM = "be brief and blue"
DISTILLED: dict[str, Any] = {
    "beta": 0.0,
    "num_generations": None,
    "num_iterations": None,
    "rewards": None,
    "max_steps": 2,
    "num_epochs": 2,
}


def write_taught(folder: Path) -> Path:
    """Rows with a teacher's system prompt and an answer."""
    rows = read_rows(folder / "rows.jsonl")
    for number, row in enumerate(rows, start=1):
        answer = {"role": "assistant", "content": "red river " * number}
        row |= {"teacher_system": SYSTEM, "completion": [answer]}
    return write_rows(folder / "taught.jsonl", rows)


def distilled_answers(folder: Path, output: Path) -> list[list[list[int]]]:
    """The tokens of each step's answers: those that the run has sampled, or of `write_taught`."""
    if (output / "rollouts.jsonl").exists():
        lines = sorted(rollouts_of(output), key=lambda line: (line["step"], line["row"]))
        tokens = [line["token_ids"] for line in lines]
        return [tokens[:4], tokens[4:]]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [f"{'red river ' * number}</s>\n" for number in range(1, 5)]
    of_step = [tokenizer(text, add_special_tokens=False)["input_ids"][:-1] for text in texts]
    return [of_step] * 2


def distilled_steps(
    folder: Path, family: str, output: Path, answers: list[list[list[int]]]
) -> tuple[list[float], list[float], Any]:
    """As `plain_steps`, of KL(teacher || student). answers: the tokens of each step and row."""
    base = load_base(folder, four_bit=False, auto=AutoModelForImageTextToText)
    model = PeftModel.from_pretrained(base, folder / "start", is_trainable=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    begin = [parameter.detach().clone() for parameter in trained]
    students = asked(folder, family)
    teachers = asked(folder, family, SYSTEM)
    losses = []
    norms = []
    for of_step in answers:
        with torch.no_grad():
            now = [parameter.clone() for parameter in trained]
            _set(trained, begin)
            expected = [
                _logits(model, *pair).log_softmax(dim=-1)
                for pair in zip(teachers, of_step, strict=True)
            ]
            _set(trained, now)
        loss = 0.0
        for pair, target in zip(zip(students, of_step, strict=True), expected, strict=True):
            away = target - _logits(model, *pair).log_softmax(dim=-1)
            loss = loss + (target.exp() * away).sum()
        loss = loss / sum(map(len, of_step))
        _update(trained, loss, losses, norms)
    model.save_pretrained(output / "plain")
    return losses, norms, load_file(output / "plain" / "adapter_model.safetensors")
