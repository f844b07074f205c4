"""Answers from a server to prompts with images: how they are sent, what ends a run, and runs."""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from fsdp_qlora.data.batches.row_images import RowImages
from fsdp_qlora.data.content import Segment
from fsdp_qlora.data.text.image_processor import ImageProcessor
from fsdp_qlora.data.text.image_store import keep_all, load
from fsdp_qlora.training.rl.client import check_takes_images
from fsdp_qlora.training.rl.engine import PromptTokens
from fsdp_qlora.training.rl.server_engine import ServerEngine
from fsdp_qlora.training.rl.server_requests import ImageSender
from fsdp_qlora.utils.errors import RankError, RolloutError
from tests.chaos.harness import Job, adapter, ended, finish, wait_for
from tests.chaos.harness import run as run_job
from tests.parity import test_multimodal
from tests.parity.test_image_rows import FAMILIES, make_family
from tests.parity.test_images import picture, png
from tests.rollouts import image_runs
from tests.rollouts.image_runs import make_folder, numbers, options_of, plain_steps
from tests.rollouts.image_server import ImageServer, shown
from tests.rollouts.lora_server import LoraServer
from tests.rollouts.runs import rollouts_of
from tests.rollouts.server_runs import END, LONGEST, ServerProcess, asked, choose
from tests.rollouts.test_ahead import kill_in
from tests.rollouts.test_image_runs import check_as_plain
from tests.rollouts.test_runs import kill_at
from tests.rollouts.test_server import farthest

Image = pytest.importorskip("PIL.Image")
VOCABULARY = 340
GENERATE = "/inference/v1/generate"


# --- prompts as they are sent ---


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_sent_with_one_token_for_each_image(family, tmp_path):
    if family == "mistral3":
        pytest.importorskip("torchvision", reason="its processor needs torchvision")
    folder = make_family(tmp_path, family)
    processor = ImageProcessor.find(folder, "tiny")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    place = FAMILIES[family].shown
    images = [picture(30 + 20 * number, 50, seed=number) for number in range(4)]
    for text in (
        f"<s>user:\n{place}{place}is\n{place}\nor{place}",
        f"<s>user:\n\n{place}\n\n\n{place}assistant:\n",
    ):
        given = images[: text.count(place)]
        segments = processor.expand([Segment(text, learned=False)], given)[0]
        ids = _tokens(tokenizer, "".join(segment.text for segment in segments))
        before = _tokens(tokenizer, text)
        assert processor.with_placeholders(ids, given) == before != ids
        with pytest.raises(ValueError, match="not in its prompt"):
            processor.with_placeholders(before, given)


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def make(family: str) -> Path:
        return make_folder(tmp_path_factory.mktemp(family), family)

    return make


class Shown:
    """Two prompts, of which the first has images in files of all kinds."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.processor = ImageProcessor(model, "tiny")
        place = "<|vision_start|><|image_pad|>"
        names, images = keep_all(_files(folder))
        text = f"<s>user:\n{place * len(names)}so?\n"
        segments = self.processor.expand([Segment(text, learned=False)], images)[0]
        tokenizer = AutoTokenizer.from_pretrained(model)
        self.names = names
        self.before = _tokens(tokenizer, text)
        self.ids = _tokens(tokenizer, "".join(segment.text for segment in segments))
        self.never = tuple(sorted(self.processor.image_ids))
        images_of_prompts = [RowImages.of_one_row(names, 0), RowImages.of_one_row([], 0)]
        self.prompts = PromptTokens([self.ids, [1, 2]], images_of_prompts)


def _files(folder: Path) -> list[Path]:
    """Images that a reader must turn or convert."""
    image = picture(40, 60, seed=1)
    turned = Image.Exif()
    turned[274] = 6  # by a quarter
    paths = [folder / name for name in ("turned.jpg", "clear.png", "print.jpg", "grey.png")]
    image.save(paths[0], exif=turned)
    clear = image.convert("RGBA")
    clear.putalpha(90)
    clear.save(paths[1])
    image.convert("CMYK").save(paths[2])
    # A profile of colours, and a colour that is transparent.
    image.convert("L").save(paths[3], transparency=7, icc_profile=b"a profile")
    return paths


@pytest.fixture
def prompt(folders: Callable[[str], Path], tmp_path: Path) -> Shown:
    return Shown(folders("qwen3_vl"), tmp_path)


@pytest.fixture
def server(prompt: Shown) -> Iterator[LoraServer]:
    def answer(folder: str, request: dict[str, Any]) -> tuple[list[int], list[float]]:
        request["prompt_token_ids"] = prompt.ids
        return choose(folder, request)

    with ImageServer("hub/base", answer, END) as found:
        yield found


@pytest.fixture
def image_engine(engine: ServerEngine, prompt: Shown) -> ServerEngine:
    engine.image_sender = ImageSender(prompt.processor)
    engine.vocab_size = VOCABULARY
    engine.options = dataclasses.replace(engine.options, never=prompt.never)
    return engine


def test_a_server_gets_the_pixels_that_the_models_processor_gets(image_engine, server, prompt):
    image_engine.server._patience = 60.0
    found = image_engine.complete(prompt.prompts.ids, 0, 0, prompt.prompts.images)
    [body] = [body for path, body in server.asked if path == GENERATE]
    assert body["token_ids"] == prompt.before and len(prompt.before) < len(prompt.ids)
    images = shown(body)
    assert len(images) == len(prompt.names) == 4
    for image, name in zip(images, prompt.names, strict=True):
        assert image.mode == "RGB" and not image.info
        assert np.array_equal(np.asarray(image), np.asarray(load(name)))
    assert images[0].size == (60, 40)
    # A prompt without images is sent as ever; neither may draw an image's token.
    [text] = asked(server, "completions")
    assert text["prompt"] == [1, 2]
    never = {str(token): -100.0 for token in prompt.never}
    assert text["logit_bias"] == body["sampling_params"]["logit_bias"] == never
    settings = {**body["sampling_params"], "prompt": body["token_ids"]}
    adapter_folder = server.adapters[body["model"]]
    assert (found[0].token_ids, found[0].logps) == choose(adapter_folder, settings)


def answers(**changes: Any) -> Any:
    """A fault: answers to prompts with images are right but for these changes."""

    def fault(path: str, body: dict[str, Any]) -> tuple[int, Any] | None:
        if path != GENERATE or "token_ids" not in body:
            return None
        choice = {"finish_reason": "length", "token_ids": [1] * LONGEST}
        choice["logprobs"] = {"content": [{"logprob": -1.0}] * LONGEST}
        choice |= {name: changes[name] for name in choice if name in changes}
        answer = {"model": body["model"], "choices": [choice]}
        return 200, answer | {name: changes[name] for name in changes if name not in choice}

    return fault


def refuses(status: int, message: str) -> Any:
    return lambda path, body: (
        (status, {"error": {"message": message}}) if path == GENERATE else None
    )


OTHER = "answers to other tokens than the prompt with images has: 2 instead of"
NUMBERS = {"content": [{"logprob": -1.0}] * (LONGEST - 1) + [None]}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (answers(), f"answers {GENERATE} without prompt_token_ids"),
        (answers(prompt_token_ids=[0, 7]), OTHER),
        (answers(prompt_token_ids=None), "with null as prompt_token_ids"),
        (refuses(400, "At most 0 image(s) may be provided"), "HTTP 400: At most 0 image(s)"),
    ],
)
def test_a_server_that_sees_other_tokens_ends_the_run(image_engine, server, prompt, fault, said):
    server.faults.append(fault)
    with pytest.raises(RolloutError) as caught:
        image_engine.complete(prompt.prompts.ids, 0, 0, prompt.prompts.images)
    assert said in str(caught.value) and server.url in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_answers_without_numbers_or_with_image_tokens_end_the_run(image_engine, server, prompt):
    image = prompt.never[0]
    for change, said in (
        ({"logprobs": None}, "none. It must answer `logprobs: 0`"),
        ({"logprobs": NUMBERS}, "in choices[0].logprobs.content"),
        ({"token_ids": [1, image, 1, 1]}, f"the token {image}, which stands for an image"),
    ):
        server.faults[:] = [answers(prompt_token_ids=prompt.ids, **change)]
        image_engine.server.is_closed = False
        with pytest.raises(RolloutError) as caught:
            image_engine.complete(prompt.prompts.ids, 0, 0, prompt.prompts.images)
        assert said in str(caught.value)


def test_an_image_that_has_changed_is_not_sent(image_engine, server, prompt, tmp_path):
    (tmp_path / "clear.png").write_bytes(png(picture(40, 60, seed=2)))
    with pytest.raises(RolloutError, match=r"clear\.png was read before, and now: it has changed"):
        image_engine.complete(prompt.prompts.ids, 0, 0, prompt.prompts.images)
    assert not [path for path, _ in server.asked if path == GENERATE]


def test_a_server_without_the_route_for_images_is_refused_at_once(server):
    check_takes_images(server.url, ["hub/base"])
    for status in (403, 404):
        server.faults[:] = [refuses(status, "disabled")]
        with pytest.raises(RankError, match=r"HTTP 40\d: disabled.*--enable-scale-out"):
            check_takes_images(server.url, ["hub/base"])


# --- whole runs ---


@pytest.fixture(scope="module")
def image_servers(
    folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], ServerProcess]]:
    """A server of a family's tiny model, in a process of its own."""
    started: list[ServerProcess] = []

    @functools.cache
    def start(family: str) -> ServerProcess:
        words = [sys.executable, "-m", "tests.rollouts.image_server"]
        log = tmp_path_factory.mktemp("server") / "server.log"
        started.append(ServerProcess(*words, str(folders(family)), family, "{port}", log=log))
        wait_for(started[-1].answers)
        return started[-1]

    yield start
    for each in started:
        each.kill()


def served(folder: Path, found: ServerProcess, output: Path, **changes: Any) -> dict[str, Any]:
    """Options of a run whose prompts this server answers."""
    options = {"base_name": "hub/tiny", "rollout_url": found.url, "output_dir": output}
    return options_of(folder, **options, save_every=1, log_to="stdout", **changes)


@pytest.mark.parametrize(
    ("family", "ranks", "batch_size"),
    [
        ("qwen3_vl", 2, 2),
        pytest.param("qwen3_vl", 1, 8, marks=pytest.mark.slow),
        # Its processor also writes tokens around an image.
        pytest.param("gemma3", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_grpo_with_a_servers_answers_to_images_trains_as_a_plain_loop(
    family, ranks, batch_size, folders, image_servers, tmp_path
):
    folder = folders(family)
    split = {"batch_size": batch_size, "gradient_accumulation_steps": 8 // ranks // batch_size}
    options = served(folder, image_servers(family), tmp_path / "out", **split)
    said = run_job(options, tmp_path / "logs", ranks=ranks)
    assert said.count("The server uses the adapter: ") == 1
    records = rollouts_of(tmp_path / "out")
    assert {len(record.get("images", ())) for record in records} == {0, 1, 2}
    assert farthest(records) < 1e-4
    check_as_plain(tmp_path / "out", plain_steps(folder, family, tmp_path / "out"))


def test_a_servers_answers_to_images_in_16_bits_train_near_the_plain_loop(
    folders, image_servers, tmp_path
):
    folder = folders("qwen3_vl")
    split = {"batch_size": 2, "gradient_accumulation_steps": 2, "precision": "bf16"}
    options = served(folder, image_servers("qwen3_vl"), tmp_path / "out", **split)
    run_job(options, tmp_path / "logs")
    losses, norms, _ = numbers(tmp_path / "out")
    expected = plain_steps(folder, "qwen3_vl", tmp_path / "out")
    # The first loss of a generation is about 0.
    assert losses == pytest.approx(expected[0], abs=0.02)
    assert norms == pytest.approx(expected[1], rel=0.03)


@pytest.mark.slow
def test_a_killed_run_with_images_ahead_gives_the_same_bytes(folders, image_servers, tmp_path):
    changes = {"batch_size": 2, "gradient_accumulation_steps": 2, "rollout_ahead": True}
    changes |= {"num_epochs": 2, "max_steps": 6}
    whole = served(folders("qwen3_vl"), image_servers("qwen3_vl"), tmp_path / "whole", **changes)
    finish(whole, tmp_path / "logs")
    out = tmp_path / "out"
    moments = ((kill_in, "asking", 16), (kill_at, "update", 3), (kill_in, "before writing", 1))
    for number, (fault, *moment) in enumerate(moments):
        options = {**whole, "output_dir": out}
        logs = tmp_path / str(number)
        with ended(Job(options, logs, fault=fault, arguments=tuple(moment))) as job:
            wait_for(lambda job=job: not job.is_alive())
            # The other rank waits for it.
            for process in job.processes:
                process.kill()
            job.wait()
            assert "Finished in" not in job.output()
    finish({**whole, "output_dir": out}, tmp_path / "last")
    records = rollouts_of(out)
    assert [record["version"] for record in records[::8]] == [0, 0, 2]
    # Generation 0 is of the weights that learn from it.
    assert farthest(records[:8]) < 1e-4 < farthest(records[8:])
    assert (out / "rollouts.jsonl").read_bytes() == (
        tmp_path / "whole" / "rollouts.jsonl"
    ).read_bytes()
    assert adapter(out) == adapter(tmp_path / "whole")


@pytest.mark.nightly
@pytest.mark.skipif(
    "FSDP_QLORA_VLLM" not in os.environ, reason="names no Python that has vLLM: docs/grpo.md"
)
def test_vllm_answers_prompts_with_images_as_the_trainer_does(tmp_path, monkeypatch):
    # Sizes that vLLM's attention takes on a CPU, and what published models say.
    monkeypatch.setitem(test_multimodal.TEXT, "head_dim", 32)
    monkeypatch.setitem(test_multimodal.TEXT, "max_position_embeddings", 512)
    monkeypatch.setitem(test_multimodal.ROPE, "mrope_section", [6, 5, 5])
    monkeypatch.setitem(test_multimodal.ROPE, "mrope_interleaved", True)
    # Not resized, in which processors with and without torchvision differ.
    sizes = [(28, 56), (56, 28), (56, 56), (28, 28)]
    pictures = [picture(*size, seed=number) for number, size in enumerate(sizes)]
    monkeypatch.setattr(image_runs, "_pictures", lambda: pictures)
    (tmp_path / "model").mkdir()
    folder = make_folder(tmp_path / "model", "qwen3_vl")
    environment = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_CPU_KVCACHE_SPACE": "1"}
    words = f"-m vllm.entrypoints.openai.api_server --model {folder} --served-model-name tiny"
    words += " --enable-lora --enable-scale-out --dtype float32 --enforce-eager --port {port}"
    command = [os.environ["FSDP_QLORA_VLLM"], *words.split()]
    found = ServerProcess(*command, log=tmp_path / "vllm.log", **environment)
    split = {"batch_size": 2, "gradient_accumulation_steps": 2}
    try:
        wait_for(found.answers)
        finish(served(folder, found, tmp_path / "out", **split), tmp_path / "logs")
    finally:
        found.kill()
    assert farthest(rollouts_of(tmp_path / "out")) < 1e-4
    check_as_plain(tmp_path / "out", plain_steps(folder, "qwen3_vl", tmp_path / "out"))
