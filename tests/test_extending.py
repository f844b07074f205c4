"""docs/extending.md, walked: its examples are added to the tables and train, and the places that it
lists exist.
"""

import json
import re
from typing import Annotated, Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from fsdp_qlora.data.text import formats, recognition
from fsdp_qlora.data.text.rendering import prompt_record
from fsdp_qlora.data.text.templates import ChosenTemplate
from fsdp_qlora.training.generation.prompt_format import PromptFormat, read_questions
from fsdp_qlora.training.rl import rewards
from tests.helpers.metrics import read_metrics
from tests.helpers.models import make_model
from tests.helpers.rows import write_rows
from tests.helpers.run import ROOT, flags, on_ranks
from tests.preferences.pairs import make_pairs

GUIDE = (ROOT / "docs" / "extending.md").read_text()
SECTIONS = dict(re.findall(r"^## A (.+)\n((?:(?!^## ).*\n?)*)", GUIDE, re.MULTILINE))
RIDDLES = [
    {"riddle": f"{word} {number}", "solution": word}
    for number in range(8)
    for word in ("river", "mountain")
]


def places(section: str) -> dict[str, list[str]]:
    """File -> the names that must be in it, of each item of the numbered list."""
    items = re.findall(r"^\d+\. (.*(?:\n   .*)*)", section, re.MULTILINE)
    found = {}
    for words in (re.findall(r"`([^`]+)`", item) for item in items):
        files = [word for word in words if "/" in word and " " not in word]
        found.update({name: [word for word in words if word.isidentifier()] for name in files})
    return found


def test_every_place_in_the_lists_exists_and_holds_its_names():
    assert list(SECTIONS) == [
        "quantizer",
        "published format",
        "train type",
        "preference objective",
        "reward function",
        "dataset format",
        "metric sink",
    ]
    for kind, section in SECTIONS.items():
        listed = places(section)
        assert len(listed) >= 4, kind
        for name, words in listed.items():
            text = (ROOT / name).read_text()
            assert [word for word in words if word not in text] == [], name


def add_the_examples() -> None:
    """Do what the lists say, in this process: the examples, and the names among the values of
    options.
    """
    from fsdp_qlora.config import cli
    from fsdp_qlora.config.marks import MAY_DIFFER, NOT_EMPTY, one_of_names
    from fsdp_qlora.config.objectives import OBJECTIVES
    from fsdp_qlora.config.options import LIMITS, TrainConfig, option_types
    from fsdp_qlora.config.train_types import TRAIN_TYPES
    from fsdp_qlora.data.text.formats import FORMATS
    from fsdp_qlora.observability.metric_log import SINKS

    for example in re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL):
        exec(example, {"__name__": "example"})
    # In the sources these are edits of fields; train_type takes the names of its table.
    LIMITS["train_type"] = one_of_names(TRAIN_TYPES)
    LIMITS["objective"] = one_of_names(OBJECTIVES)
    fields: dict[str, Any] = TrainConfig.__annotations__
    fields["dataset_format"] = Literal[("auto", *FORMATS)]
    fields["log_to"] = Annotated[tuple[Literal[tuple(SINKS)], ...], NOT_EMPTY, MAY_DIFFER]
    cli._HINTS.update(option_types())


def store_in_int8(folder):
    """Change a model's weights to the guide's published format."""
    file = folder / "model.safetensors"
    stored = {}
    for name, value in load_file(file).items():
        if name.endswith("_proj.weight"):
            scale = value.float().abs().amax(1) / 127
            stored[f"{name}_scale"] = scale
            value = (value.float() / scale[:, None]).round().to(torch.int8)
        stored[name] = value
    save_file(stored, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "int8_by_row"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def train_with_the_examples(argv: list[str]) -> int:
    import train

    add_the_examples()
    return train.main(argv)


def test_one_of_each_is_added_in_its_places_and_trains(tmp_path):
    output = tmp_path / "output"
    argv = flags(
        model_name=store_in_int8(make_model(tmp_path / "model")),
        dataset=write_rows(tmp_path / "riddles.jsonl", RIDDLES),
        dataset_format="riddle",
        train_type="float8_lora",
        log_to="csv,stdout",
        output_dir=output,
        batch_size=4,
        lr=1e-2,
        num_epochs=3,
        max_steps=6,
        quant_cache=tmp_path / "cache",
    )
    statuses, said = on_ranks(2, train_with_the_examples, (argv,), tmp_path / "logs")
    assert statuses == [0, 0], said[-4000:]

    losses = read_metrics(output)
    assert losses[-1] < losses[0]
    lines = [line.split(",") for line in (output / "metrics.csv").read_text().splitlines()]
    assert [(int(step), float(loss)) for step, loss in lines] == list(enumerate(losses, 1))

    assert "Riddle: river 0 Solution: -> " in said
    assert "The model is stored in INT8: its weights are decoded to bf16 as they are read" in said
    assert "is bit-identical to its weight quantized whole" in said
    assert len(list((tmp_path / "cache").rglob("checksums.json"))) == 1
    with safe_open(output / "adapter_model.safetensors", "pt") as adapter:
        assert [name for name in adapter.keys() if "lora_B" in name]  # noqa: SIM118


def test_a_format_of_the_guide_is_asked_by_generate(monkeypatch, tmp_path):
    example = SECTIONS["dataset format"].partition("```python\n")[2].partition("```")[0]
    monkeypatch.setattr(formats, "FORMATS", formats.FORMATS.copy())
    monkeypatch.setattr(recognition, "FORMATS", formats.FORMATS)
    exec(example, {"__name__": "example"})
    [asked] = read_questions(write_rows(tmp_path / "rows.jsonl", [{"riddle": "river 0"}]))
    tokenizer = AutoTokenizer.from_pretrained(make_model(tmp_path / "model"))
    ids = (
        PromptFormat(tokenizer, prompt_record("riddle", ChosenTemplate())).encode(asked.content).ids
    )
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Riddle: river 0\nSolution:"


def test_a_reward_function_is_a_function_and_a_row(monkeypatch):
    monkeypatch.setattr(rewards, "REWARD_FACTORIES", rewards.REWARD_FACTORIES.copy())
    exec(
        SECTIONS["reward function"].partition("```python\n")[2].partition("```")[0],
        {"__name__": "example"},
    )
    [found] = rewards.parse_rewards(["contains:so it is=0.5"])
    assert (found.name, found.weight) == ("contains", 0.5)
    assert rewards.builtin(found.word)(
        completions=["so it is 3", "3"], completion_ids=[[1]] * 2
    ) == [1, 0]


def test_an_objective_is_a_function_and_a_row(tmp_path):
    argv = flags(
        model_name=make_model(tmp_path / "model"),
        dataset=write_rows(tmp_path / "pairs.jsonl", make_pairs()),
        objective="apo_zero",
        output_dir=tmp_path / "output",
        batch_size=4,
        lr=1e-2,
        num_epochs=4,
        quant_cache="off",
    )
    statuses, said = on_ranks(2, train_with_the_examples, (argv,), tmp_path / "logs")
    assert statuses == [0, 0], said[-4000:]
    first, *_, last = read_metrics(tmp_path / "output")
    assert first == 1 and last < 0.9
    assert read_metrics(tmp_path / "output", "rewards/accuracies")[-1] == 1
