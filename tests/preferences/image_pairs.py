"""Pairs with images, and their losses by a plain loop of transformers' processor and PEFT."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel, get_peft_model_state_dict
from transformers import AutoModelForImageTextToText, AutoTokenizer

from tests.helpers.reference import (
    answer_logps,
    load_base,
    peft_model,
    step_plainly,
    train_on_loss,
)
from tests.helpers.rows import write_rows
from tests.parity.test_images import LORA, PROCESSORS, encode, make_chats, picture, png
from tests.parity.test_multimodal import make_multimodal
from tests.parity.test_tower_adapters import fill_zeros

STEPS = 4
BETA = 0.1
Row = dict[str, Any]
Side = dict[str, torch.Tensor]


def make_model(folder: Path, family: str) -> Path:
    """A tiny model with its processor, whose answers depend on images."""
    make_multimodal(folder, family)
    fill_zeros(folder)
    PROCESSORS[family](folder)
    return folder


def split_chats(folder: Path) -> list[tuple[list[Row], Row, Row, list[Any]]]:
    """Of each chat the prompt, the last answer, the row's other columns and its images."""
    found = []
    for row, images in zip(*make_chats(folder), strict=True):
        *prompt, answer = row["messages"]
        columns = {name: value for name, value in row.items() if name != "messages"}
        found.append((prompt, answer, columns, images))
    return found


def worse(number: int) -> Row:
    """The rejected answer of a row: of other lengths than the chosen one."""
    return {"role": "assistant", "content": "red " * (1 + number % 3) + "list"}


def make_image_pairs(folder: Path) -> list[Row]:
    """Rows with a chosen and a rejected answer, with and without images."""
    return [
        {**columns, "prompt": prompt, "chosen": [answer], "rejected": [worse(number)]}
        for number, (prompt, answer, columns, _) in enumerate(split_chats(folder))
    ]


def make_image_labels(folder: Path) -> list[Row]:
    """Rows with one of the two answers, and whether it is the chosen one."""
    return [
        {
            **columns,
            "prompt": prompt,
            "completion": [answer if number % 3 else worse(number)],
            "label": number % 3 > 0,
        }
        for number, (prompt, answer, columns, _) in enumerate(split_chats(folder))
    ]


def write_image_pairs(folder: Path) -> None:
    write_rows(folder / "pairs.jsonl", make_image_pairs(folder))
    write_rows(folder / "labels.jsonl", make_image_labels(folder))


class PlainLosses:
    """The losses of all rows, each answer computed for itself."""

    def __init__(self, family: str, folder: Path) -> None:
        self._processor = PROCESSORS[family](folder)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._rows = split_chats(folder)

    def _side(self, number: int, answer: Row) -> Side:
        """The model's arguments for a row's prompt with an answer, whose tokens have labels."""
        prompt, _, _, images = self._rows[number]
        row = {"messages": [*prompt, answer]}
        side = encode(self._processor, self._tokenizer, row, images)
        labels = side["labels"][0]
        # Not those of earlier answers, which are a part of the prompt.
        masked = (labels[: labels.nonzero().max() + 1] == -100).nonzero()
        last = (labels != -100).nonzero().max()
        labels[: masked[masked < last].max() + 1] = -100
        return side

    def sides(self) -> list[tuple[Side, Side]]:
        """The chosen and the rejected side of each row."""
        return [
            (self._side(number, row[1]), self._side(number, worse(number)))
            for number, row in enumerate(self._rows)
        ]

    def dpo(self, model: PeftModel) -> torch.Tensor:
        """Rafailov et al. 2023, eq. 7."""
        losses = []
        for chosen, rejected in self.sides():
            margin = _ratio(model, chosen) - _ratio(model, rejected)
            losses.append(-F.logsigmoid(BETA * margin))
        return torch.stack(losses).mean()

    def orpo(self, model: PeftModel) -> torch.Tensor:
        """Hong et al. 2024, eq. 7, with the likelihood of all tokens of chosen answers."""
        losses = []
        chosen_logps = []
        for sides in self.sides():
            logps = [answer_logps(model, side) for side in sides]
            odds = [mean - torch.log1p(-mean.exp()) for mean in map(torch.mean, logps)]
            losses.append(-BETA * F.logsigmoid(odds[0] - odds[1]))
            chosen_logps.append(logps[0])
        return torch.stack(losses).mean() - torch.cat(chosen_logps).mean()

    def kto(self, model: PeftModel) -> torch.Tensor:
        """Ethayarajh et al. 2024, eq. 8, with the answer of the row before for the divergence."""
        answers = [row[1] if number % 3 else worse(number) for number, row in enumerate(self._rows)]
        ratios = [_ratio(model, self._side(*each)) for each in enumerate(answers)]
        with torch.no_grad():
            others = [
                _ratio(model, self._side(number, answers[number - 1]))
                for number in range(len(answers))
            ]
        divergence = torch.stack(others).mean().clamp(min=0)
        signs = torch.tensor([1.0 if number % 3 else -1.0 for number in range(len(answers))])
        return (1 - (signs * BETA * (torch.stack(ratios) - divergence)).sigmoid()).mean()


def _ratio(model: PeftModel, side: Side) -> torch.Tensor:
    """The log-probability of an answer, less that without the adapter."""
    with torch.no_grad(), model.disable_adapter():
        reference = answer_logps(model, side).sum()
    return answer_logps(model, side).sum() - reference


def plain(family: str, folder: Path, objective: str, layers: str = LORA) -> Any:
    """Losses, gradient norms and the adapter of a plain loop.

    layers: with adapters, a pattern of all of a path.
    """
    base = load_base(folder, four_bit=False, auto=AutoModelForImageTextToText)
    loss_of = getattr(PlainLosses(family, folder), objective)
    return train_on_loss(base, loss_of, layers, steps=STEPS)


def save_start(folder: Path) -> Path:
    """Save an adapter with random values to start from."""
    base = load_base(folder, four_bit=False, auto=AutoModelForImageTextToText)
    model = peft_model(base, r=4, lora_alpha=6, target_modules=LORA)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    model.save_pretrained(folder / "start")
    return folder / "start"


def plain_dpo_from(start: Path, family: str, folder: Path) -> Any:
    """The same of DPO from a saved adapter, with which the reference is computed."""
    base = load_base(folder, four_bit=False, auto=AutoModelForImageTextToText)
    model = PeftModel.from_pretrained(base, start, is_trainable=True)
    pairs = PlainLosses(family, folder).sides()
    with torch.no_grad():
        reference = [[answer_logps(model, side).sum() for side in sides] for sides in pairs]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
    losses = []
    norms = []
    for _ in range(STEPS):
        terms = []
        for sides, before in zip(pairs, reference, strict=True):
            now = [answer_logps(model, side).sum() for side in sides]
            terms.append(-F.logsigmoid(BETA * (now[0] - before[0] - now[1] + before[1])))
        loss = torch.stack(terms).mean()
        losses.append(loss.item())
        norms.append(step_plainly(optimizer, loss))
    return losses, norms, get_peft_model_state_dict(model)


# --- the same rows for TRL's trainers ---

TRL_CASES = (("qwen3_vl", "dpo"), ("gemma3", "dpo"), ("qwen3_vl", "kto"))
TRL_LR = 0.3  # of SGD, as in pairs.py


def make_model_of_trl(folder: Path, family: str) -> None:
    """A model whose chat template ends with the answer: TRL learns all that is behind a prompt."""
    make_model(folder, family)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = str(tokenizer.chat_template)
    template = template.replace("{{ m.role }}:", "{{ '' if loop.first else '\n' }}{{ m.role }}:")
    template = template.replace("}}\n{% endfor %}", "}}{% endfor %}")
    tokenizer.chat_template = template.replace("%}assistant:", "%}{{ '\n' }}assistant:")
    tokenizer.save_pretrained(folder)
    rows_of_trl(folder, "dpo")


def rows_of_trl(folder: Path, objective: str) -> list[Row]:
    """Rows in TRL's form: places for images are parts, and their files are in a column."""
    said = [(2, "name it"), (0, "write seven words"), (1, "which number"), (1, "sort"), (0, "so")]
    images = iter(range(9))
    rows = []
    for number, (count, question) in enumerate(said):
        names = [f"of_trl_{next(images)}.png" for _ in range(count)]
        for place, name in enumerate(names):
            shown = picture(40 + 9 * number, 60 - 7 * place, seed=number)
            (folder / name).write_bytes(png(shown))
        parts = [{"type": "image", "text": None}] * count + [{"type": "text", "text": question}]
        answers = {
            "chosen": [
                {"role": "assistant", "content": "blue river " * (1 + number % 2) + "seven"}
            ],
            "rejected": [worse(number)],
        }
        if objective == "kto":
            is_chosen = number % 3 > 0
            side = "chosen" if is_chosen else "rejected"
            answers = {"completion": answers[side], "label": is_chosen}
        prompt = [{"role": "user", "content": parts}]
        rows.append({"images": names, "prompt": prompt, **answers})
    return rows
