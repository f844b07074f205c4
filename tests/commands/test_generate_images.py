"""`generate` answers prompts with images as transformers does, and evaluations as `generate`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from fsdp_qlora.__main__ import main
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.text.image_processor import ImageProcessor
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.planning.generation import AnswerSize, plan_generation
from fsdp_qlora.planning.machine import Machine
from fsdp_qlora.planning.placement import place
from fsdp_qlora.planning.plan import plan_model
from fsdp_qlora.training.generation.prompt_format import read_questions
from fsdp_qlora.utils.errors import UserError
from tests.commands.test_evaluate import measured
from tests.commands.test_generate import LENGTH, generate
from tests.helpers.metrics import read_metrics
from tests.helpers.rows import read_rows, write_rows
from tests.helpers.run import flags, train_ok
from tests.parity.test_image_rows import FAMILIES, make_family
from tests.parity.test_images import make_chats, picture

if hasattr(AutoImageProcessor, "_backends"):
    pytest.skip(
        "images need torchvision with this release of transformers", allow_module_level=True
    )
FAMILY = "qwen2_5_vl"
OPTIONS = {"train_type": "lora", "precision": "fp32"}


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


PART = {"type": "image", "path": "5.png"}
SO = "<s>user:\nIMAGEso\nassistant:\n"
# Prompts in the forms of rows, with their texts, in which IMAGE stands for the next image, and its
# number. With one prompt on each of two ranks there are rounds in which one rank has images, or
# none has any.
PROMPTS: list[tuple[dict[str, Any], str, list[int]]] = [
    ({"prompt": "name it", "images": ["0.png"]}, "<s>user:\nIMAGEname it\nassistant:\n", [0]),
    ({"prompt": "sort the list"}, "<s>user:\nsort the list\nassistant:\n", []),
    (
        {
            "messages": [
                turn("user", "<image>name it<image>"),
                turn("assistant", "red river"),
                turn("user", "and<image>"),
                turn("assistant", "blue"),
            ],
            "images": ["0.png", "1.png", "2.png"],
        },
        "<s>user:\nIMAGEname itIMAGE\nassistant:\nred river</s>\nuser:\nandIMAGE\nassistant:\n",
        [0, 1, 2],
    ),
    ({"messages": [turn("user", [PART, {"type": "text", "text": "so"}])]}, SO, [5]),
    ({"prompt": "water"}, "<s>user:\nwater\nassistant:\n", []),
    ({"prompt": "blue"}, "<s>user:\nblue\nassistant:\n", []),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers depend on what it sees, with images beside it."""
    folder = make_family(tmp_path_factory.mktemp("base"), FAMILY)
    make_chats(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


def expected(base: Path) -> list[list[int]]:
    """The tokens that transformers generates, one prompt after the other."""
    processor = ImageProcessor(base, FAMILY)._processor
    model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32).eval()
    answers = []
    for _, text, numbers in PROMPTS:
        images = [picture(40 + 9 * n, 60 - 5 * n, seed=n) for n in numbers]
        inputs = processor(
            text=[text.replace("IMAGE", FAMILIES[FAMILY].shown)],
            images=[images] if images else None,
            add_special_tokens=False,
            return_tensors="pt",
        )
        end = processor.tokenizer.eos_token_id
        made = model.generate(
            **inputs, max_new_tokens=LENGTH, do_sample=False, eos_token_id=end, pad_token_id=end
        )
        answers.append(made[0, inputs["input_ids"].shape[1] :].tolist())
    return answers


def test_answers_to_images_on_two_ranks_are_those_of_transformers(base, tmp_path):
    rows = [row for row, *_ in PROMPTS]
    asked = write_rows(base / "prompts.jsonl", rows)
    tokens = expected(base)
    texts = ImageProcessor(base, FAMILY)._processor.tokenizer.batch_decode(
        tokens, skip_special_tokens=True
    )
    assert len(set(texts)) == len(texts)
    for ranks, options in (
        (2, {"batch_size": 1}),
        (2, {"batch_size": 2, "use_cpu_offload": True}),
        (1, {"batch_size": 6}),
    ):
        name = f"{ranks}_{options['batch_size']}"
        out = tmp_path / f"{name}.jsonl"
        words = {"model_name": base, "prompts": asked, "out": out, **OPTIONS, **options}
        generate(ranks, tmp_path / name, **words)
        found = read_rows(out)
        assert [row["completion"] for row in found] == texts, name
        named = [{key: row[key] for key in own} for row, own in zip(found, rows, strict=True)]
        assert named == rows
    image = base / "0.png"
    said = generate(1, tmp_path / "one", model_name=base, prompt="name it", image=image, **OPTIONS)
    assert said.endswith(f"\n{texts[0]}\n")


def test_a_chat_shows_an_image_with_the_next_question(base, tmp_path):
    typed = f"/image {base / '0.png'}\nname it\n\n/image missing.png\nwater\n"
    said = generate(2, tmp_path / "chat", stdin=typed, model_name=base, **OPTIONS)
    tokens = expected(base)
    tokenizer = ImageProcessor(base, FAMILY)._processor.tokenizer
    texts = tokenizer.batch_decode([tokens[0], tokens[4]], skip_special_tokens=True)
    assert "missing.png: there is no such file." in said
    assert f"{texts[0]}\n" in said and f"{texts[1]}\n" in said


@pytest.mark.slow
def test_answers_to_images_in_16_bits_are_the_same_on_two_ranks(base, tmp_path):
    asked = write_rows(base / "prompts.jsonl", [row for row, *_ in PROMPTS])
    answers = []
    for ranks in (1, 2):
        out = tmp_path / f"{ranks}.jsonl"
        words = {**OPTIONS, "model_name": base, "prompts": asked, "out": out, "batch_size": 1}
        generate(ranks, tmp_path / str(ranks), **words | {"precision": "bf16"})
        answers.append([row["completion"] for row in read_rows(out)])
    assert answers[0] == answers[1]
    assert len(set(answers[0])) == len(PROMPTS)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "so", "images": ["missing.png"]}, "missing.png cannot be read"),
        ({"prompt": "so <image>", "images": ["0.png", "1.png"]}, "has 2 images, and its messages"),
        ({"prompt": "so", "images": ["https://a.b/c.png"]}, "is a URL"),
    ],
)
def test_a_prompt_with_a_bad_image_is_named_before_weights_are_read(
    row, reason, base, tmp_path, capsys
):
    weights = tmp_path / "model"
    weights.mkdir()
    for path in base.iterdir():
        if path.suffix != ".safetensors":
            (weights / path.name).symlink_to(path)
    asked = write_rows(weights / "asked.jsonl", [{"prompt": "sort"}, row])
    argv = flags(model_name=weights, prompts=asked, out=tmp_path / "out.jsonl", **OPTIONS)
    assert main(["generate", *argv, "--nproc_per_node", "1"]) == 2
    said = capsys.readouterr().err
    assert f"{asked}:2" in said and reason in said


NOTE = """
import json, pathlib
def noted(prompts, completions, **_):
    said = [each[-1]["content"] if isinstance(each, list) else each for each in completions]
    with open(pathlib.Path(__file__).with_suffix(".jsonl"), "a") as file:
        file.write(json.dumps(said) + "\\n")
    return [float(len(text)) for text in said]
"""


def test_evaluations_answer_images_as_generate_does_afterwards(base, tmp_path):
    rows = make_chats(base)[0]
    # One rank has images, and the other one none.
    held_out = write_rows(base / "held_out.jsonl", [rows[6], rows[7], rows[2]])
    samples = write_rows(base / "samples.jsonl", [row for row, *_ in PROMPTS[:2]])
    (tmp_path / "own.py").write_text(NOTE)
    scores = {"eval_rewards": f"{tmp_path / 'own.py'}:noted", "max_completion_length": 8}
    options = {**OPTIONS, "model_name": base, "lora_rank": 4, "batch_size": 1, **scores}
    out = tmp_path / "run"
    train_ok(
        2,
        out,
        dataset=write_rows(base / "rows.jsonl", rows),
        eval_dataset=held_out,
        sample_prompts=samples,
        max_steps=1,
        **options,
    )
    own = {"precision": "fp32", "adapter": out}
    said = tmp_path / "said.jsonl"
    generate(2, tmp_path / "again", prompts=samples, out=said, max_new_tokens=128, **own)
    texts = [row["completion"] for row in read_rows(said)]
    assert [row["text"] for row in read_rows(out / "samples.jsonl")][-2:] == texts
    said = tmp_path / "of_held_out.jsonl"
    generate(1, tmp_path / "held_out", prompts=held_out, out=said, max_new_tokens=8, **own)
    texts = [row["completion"] for row in read_rows(said)]
    assert json.loads((tmp_path / "own.jsonl").read_text().splitlines()[-1]) == texts
    found = measured(2, tmp_path / "measured", "--dataset", str(held_out), **scores, adapter=out)
    loss = read_metrics(out, "eval_loss")[-1]
    reward = read_metrics(out, "eval_reward")[-1]
    [result] = found.values()
    assert result["loss"] == pytest.approx(loss, rel=1e-5)
    assert result["reward"] == pytest.approx(reward)


def test_a_model_of_text_refuses_images_before_weights_are_read(models, tmp_path, capsys):
    (tmp_path / "model").mkdir()
    for path in models().iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / "model" / path.name).symlink_to(path)
    argv = flags(model_name=tmp_path / "model", prompt="so", image=tmp_path / "a.png", **OPTIONS)
    assert main(["generate", *argv, "--nproc_per_node", "1"]) == 2
    assert "--prompt: the prompt cannot be used: it shows images, and the model takes text" in (
        capsys.readouterr().err
    )


def test_the_files_are_named_that_a_folder_of_a_model_for_images_lacks(base, tmp_path, capsys):
    lacking = tmp_path / "model"
    lacking.mkdir()
    for path in Path(base).iterdir():
        if path.is_file() and "processor_config" not in path.name:
            (lacking / path.name).symlink_to(path)
    picture(30, 20, seed=0).save(tmp_path / "a.png")
    argv = flags(model_name=lacking, prompt="so", image=tmp_path / "a.png", **OPTIONS)
    assert main(["generate", *argv, "--nproc_per_node", "1"]) == 2
    lacks = "folder has neither processor_config.json nor preprocessor_config.json"
    assert f"it shows images, and the model's {lacks}" in capsys.readouterr().err
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "so <image>"}])
    with pytest.raises(UserError, match=r"rows.jsonl:1 .* it shows <image>, and no image is given"):
        read_questions(rows)


def test_a_plan_counts_the_images_of_a_prompt_once_for_its_answers(base):
    config = TrainConfig(model_name=str(base), train_type="lora", precision="fp32")
    machine = Machine.of(config, Ranks(0, 0, 1, 1, torch.device("cpu")))
    placed = place(config, plan_model(config, machine, None))
    alone, of_eight = (
        plan_generation(placed, 4000, AnswerSize(64, 8, 5_000_000, number), free=None)
        for number in (1, 8)
    )
    # A part of the answers to a prompt may be in another batch.
    assert 5 * alone.at_a_time < of_eight.at_a_time <= 8 * alone.at_a_time
    assert of_eight.cache < 2**30


def test_a_plan_answers_fewer_prompts_at_a_time_with_large_images(base):
    config = TrainConfig(model_name=str(base), train_type="lora", precision="fp32")
    machine = Machine.of(config, Ranks(0, 0, 1, 1, torch.device("cpu")))
    placed = place(config, plan_model(config, machine, None))
    values = 5_000_000
    of_text, of_images = (
        plan_generation(placed, 100, AnswerSize(64, 8, each), free=None) for each in (0, values)
    )
    assert of_text.at_a_time == 100 > of_images.at_a_time > 1
    # A CPU has 1 GiB for it, and pixels alone take 4 bytes each.
    pixels = 4 * values * of_images.at_a_time
    assert pixels < of_images.cache < 2**30
