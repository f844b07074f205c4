"""Preferences on rows with images train as in a plain loop of PEFT."""

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_qlora.config.objectives import PAIRS
from fsdp_qlora.data.content import Chat, Fields, PreferenceRow
from fsdp_qlora.data.text.chats import read_chat
from fsdp_qlora.data.text.formats import FORMATS
from fsdp_qlora.data.text.recognition import RequestedFormat
from fsdp_qlora.data.text.templates import as_chat
from tests.chaos.harness import adapter, numbers, run
from tests.helpers.metrics import metrics_of, read_metrics
from tests.helpers.reference import LINEARS
from tests.helpers.rows import write_rows
from tests.helpers.run import flags, on_ranks, train_ok
from tests.parity.test_images import OPTIONS, check_as_plain
from tests.preferences.image_pairs import (
    STEPS,
    TRL_CASES,
    TRL_LR,
    make_model,
    make_model_of_trl,
    plain,
    plain_dpo_from,
    rows_of_trl,
    save_start,
    write_image_pairs,
)
from tests.preferences.pairs import sketch
from tests.rollouts.test_runs import kill_at

TRL = json.loads(Path(__file__).with_name("trl_images.json").read_text())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def make(family: str) -> Path:
        folder = make_model(tmp_path_factory.mktemp(family), family)
        write_image_pairs(folder)
        return folder

    return make


def options_of(folder: Path, objective: str) -> dict[str, Any]:
    return {
        **OPTIONS,
        "model_name": folder,
        "dataset": folder / ("labels.jsonl" if objective == "kto" else "pairs.jsonl"),
        "objective": objective,
        "num_epochs": STEPS,
        "lora_target_modules": ",".join(LINEARS),
    }


@pytest.mark.parametrize(
    ("family", "objective", "ranks", "changed"),
    [
        ("qwen3_vl", "dpo", 2, {"recompute": "all", "use_cpu_offload": True}),
        ("gemma3", "dpo", 1, {"recompute": "none"}),
        ("qwen3_vl", "kto", 1, {}),
        ("qwen3_vl", "orpo", 1, {}),
    ],
)
def test_preferences_on_images_train_as_in_a_plain_loop(
    family, objective, ranks, changed, folders, tmp_path
):
    folder = folders(family)
    output = train_ok(
        ranks,
        tmp_path / "out",
        **options_of(folder, objective),
        batch_size=2,
        gradient_accumulation_steps=4 // ranks,
        **changed,
    )
    assert ("Rows are padded" in output) == (family == "gemma3")
    check_as_plain(tmp_path / "out", plain(family, folder, objective))


@pytest.mark.parametrize(("family", "ranks"), [("qwen3_vl", 2), ("gemma3", 1)])
def test_image_pairs_train_a_saved_adapter_as_in_a_plain_loop(family, ranks, folders, tmp_path):
    folder = folders(family)
    start = save_start(folder)
    options = options_of(folder, "dpo") | {"adapter": start, "batch_size": 2}
    train_ok(ranks, tmp_path / "out", **options, gradient_accumulation_steps=4 // ranks)
    check_as_plain(tmp_path / "out", plain_dpo_from(start, family, folder))


def test_pairs_with_images_start_from_loftq_which_is_their_reference(folders, tmp_path):
    folder = folders("qwen3_vl")
    options = options_of(folder, "dpo") | {"train_type": "qlora", "batch_size": 8}
    options |= {"eval_dataset": options["dataset"], "save_every": 2, "save_total_limit": 9}
    train_ok(1, tmp_path / "base", **options, max_steps=1)
    options["init_lora_weights"] = "loftq"
    train_ok(1, tmp_path / "whole", **options)
    base, *_ = (line for line in metrics_of(tmp_path / "base") if "eval_loss" in line)
    first, *_, last = (line for line in metrics_of(tmp_path / "whole") if "eval_loss" in line)
    rewards = [first[f"rewards/{side}"] for side in ("chosen", "rejected")]
    assert rewards == pytest.approx([0, 0], abs=1e-6)
    assert last["rewards/accuracies"] == 1
    for side in ("chosen", "rejected"):
        before, after = (
            record[f"logps/{side}"] - record[f"rewards/{side}"] / 0.1 for record in (first, last)
        )
        assert after == pytest.approx(before, rel=1e-5)
        assert before != pytest.approx(base[f"logps/{side}"], rel=1e-4)
    at = tmp_path / "whole/checkpoints/step_000002"
    train_ok(1, tmp_path / "resumed", resume=at, **options)
    assert adapter(tmp_path / "resumed") == adapter(tmp_path / "whole")


@pytest.mark.parametrize(("family", "objective"), TRL_CASES)
def test_preferences_on_images_match_trl(family, objective, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    make_model_of_trl(folder, family)
    options = options_of(folder, objective)
    options |= {"dataset": write_rows(folder / "rows.jsonl", rows_of_trl(folder, objective))}
    options |= {"optimizer": "sgd", "lr": TRL_LR}
    train_ok(1, tmp_path / "out", **options, batch_size=2, gradient_accumulation_steps=3)
    expected = TRL[f"{family}, {objective}"]
    found = metrics_of(tmp_path / "out")
    assert len(found) == len(expected["steps"]) == STEPS
    for ours, trl in zip(found, expected["steps"], strict=True):
        assert {key: ours[key] for key in trl} == pytest.approx(trl, rel=1e-5, abs=1e-5)
    assert sketch(tmp_path / "out") == pytest.approx(expected["adapter"], rel=1e-5, abs=1e-5)


IMAGE = {"bytes": b"x", "path": None}
PARTS = [{"type": "image", "text": None}, {"type": "text", "text": "who?"}]


def said(role: str, content: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": content}]


def of_sharegpt(role: str, value: str) -> dict[str, str]:
    return {"from": role, "value": value}


WORDS = {"chosen": "go", "rejected": "no"}
ANSWERS = {
    name: said("assistant", [{"type": "text", "text": word}]) for name, word in WORDS.items()
}
# Columns of published sets, whose prompt shows one image.
SETS: dict[str, dict[str, Any]] = {
    "RLAIF-V": {"question": "who?", "image": IMAGE, "image_path": "a.jpg", **WORDS},
    "text": {"prompt": "who?", "image": IMAGE, **WORDS},
    "trl-lib/rlaif-v": {"prompt": said("user", "who?"), "images": [IMAGE], **ANSWERS},
    "H4/rlaif-v": {"prompt": said("user", PARTS), "images": [IMAGE], **ANSWERS},
    "whole": {
        "images": [IMAGE],
        **{name: said("user", PARTS) + answer for name, answer in ANSWERS.items()},
    },
    "RLHF-V": {
        "conversations": [of_sharegpt("human", "<image>who?")],
        "chosen": of_sharegpt("gpt", "go"),
        "rejected": of_sharegpt("gpt", "no"),
        "images": [IMAGE],
    },
    "RLHF-V's own": {
        "ds_name": "RLHF-V",
        "image": IMAGE,
        "text": json.dumps({"question": "who?", **WORDS}),
        "origin_split": '{"model": "x", "type": "detailed_description"}',
        "idx": 7,
        "image_path": "a.jpg",
    },
    "ms-swift": {
        "messages": [*said("user", "<image>who?"), *said("assistant", "go")],
        "rejected_response": "no",
        "images": [IMAGE],
    },
}


@pytest.mark.quick
@pytest.mark.parametrize("name", SETS)
def test_images_are_found_in_published_preference_sets(name):
    row = SETS[name]
    reading = RequestedFormat().find([*row], [row])
    row_format = FORMATS[reading.dataset_format]
    assert row_format.row_kind == PAIRS and not reading.watched
    content = row_format.read(reading.named(row))
    assert isinstance(content, PreferenceRow)
    for answer, word in zip(content.answers, ("go", "no"), strict=True):
        if isinstance(answer, Fields):
            assert answer.shows
            answer = read_chat(answer.shows, as_chat(answer).messages)
        assert isinstance(answer, Chat) and answer.images == (b"x",)
        first, last = answer.messages
        assert first["content"] == [{"type": "image"}, {"type": "text", "text": "who?"}]
        assert last["content"] == [{"type": "text", "text": word}]


def _count_images(argv: list[str], file: Path) -> int:
    """A run; writes how many images each call of its vision tower has got on this rank."""
    import train

    counts = []

    def note(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not type(module).__name__.endswith("Qwen3VLVisionModel"):
            return
        # The plan computes shapes on the meta device.
        if not output.pooler_output.is_meta:
            [grids] = [*args[1:2], *(kwargs[name] for name in ("grid_thw",) if name in kwargs)]
            counts.append(len(grids))

    with torch.nn.modules.module.register_module_forward_hook(note, with_kwargs=True):
        status = train.main(argv)
    file.with_suffix(f".{os.environ['RANK']}").write_text(json.dumps(counts))
    return status


def test_an_image_is_computed_once_a_pair_and_a_resumed_run_is_the_same(folders, tmp_path):
    folder = folders("qwen3_vl")
    options = options_of(folder, "dpo") | {
        "batch_size": 2,
        "gradient_accumulation_steps": 4,
        "recompute": "all",
        "save_every": 1,
        "save_total_limit": 9,
        "context_length": 512,
        "lora_dropout": 0.1,
    }
    argv = flags(output_dir=tmp_path / "whole", quant_cache="off", log_to="stdout", **options)
    statuses, output = on_ranks(1, _count_images, (argv, tmp_path / "counts"), tmp_path / "logs")
    assert statuses == [0], output
    counts = json.loads((tmp_path / "counts.0").read_text())
    # Six images in eight pairs. Before the first step two rows are tried, together and alone, and
    # a row with its reference and without.
    assert sum(counts[-3 * STEPS :]) == 6 * STEPS and len(counts) == 3 * STEPS + 4
    train_ok(1, tmp_path / "resumed", resume=tmp_path / "whole/checkpoints/step_000001", **options)
    first, second = (
        (tmp_path / name / "adapter_model.safetensors").read_bytes()
        for name in ("whole", "resumed")
    )
    assert first == second


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_a_reference_of_images_may_be_computed_before_training(objective, folders, tmp_path):
    options = options_of(folders("qwen3_vl"), objective) | {"batch_size": 4, "num_epochs": 2}
    records = []
    for precomputes in (False, True):
        output = tmp_path / str(precomputes)
        train_ok(1, output, precompute_reference=precomputes, **options)
        records.append(read_metrics(output))
    assert records[1] == pytest.approx(records[0], rel=1e-5)


def test_killed_preferences_on_images_give_the_same_bytes(folders, tmp_path):
    options = options_of(folders("qwen3_vl"), "dpo") | {
        "batch_size": 2,
        "gradient_accumulation_steps": 2,
        "save_every": 1,
        "lora_dropout": 0.1,
        "quant_cache": "off",
    }
    run({**options, "output_dir": tmp_path / "whole"}, tmp_path / "reference")
    out = tmp_path / "out"
    # In the second step, and while a later checkpoint is written.
    for number, (phase, count) in enumerate((("update", 2), ("save", 9))):
        killed = {"fault": kill_at, "arguments": (phase, count)}
        run({**options, "output_dir": out}, tmp_path / str(number), [-9, -9], **killed)
    run({**options, "output_dir": out}, tmp_path / "last")
    assert adapter(out) == adapter(tmp_path / "whole")
    assert numbers(out) == numbers(tmp_path / "whole")


def test_image_pairs_in_16_bits_over_micro_batches_are_near_fp32(folders, tmp_path):
    folder = folders("qwen3_vl")
    options = options_of(folder, "dpo") | {"batch_size": 1, "gradient_accumulation_steps": 4}
    train_ok(2, tmp_path / "out", **options | {"precision": "bf16"})
    [losses, norms, *_] = plain("qwen3_vl", folder, "dpo")
    assert read_metrics(tmp_path / "out") == pytest.approx(losses, rel=0.02)
    assert read_metrics(tmp_path / "out", "grad_norm") == pytest.approx(norms, rel=0.02)
