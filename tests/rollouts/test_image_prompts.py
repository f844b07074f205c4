"""Prompts with images: which are left out, what the cache and reward functions have of them."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdp_qlora.data import prompt_cache
from fsdp_qlora.data.run_data import RunData
from fsdp_qlora.training.generation.sampling import Completion
from fsdp_qlora.training.rl.answers import answers_of_prompts
from fsdp_qlora.training.rl.rewards import Scorer
from fsdp_qlora.training.rl.scoring import reward_arguments
from fsdp_qlora.utils import verified_stamps
from tests.data.rows import write_jsonl, write_parquet
from tests.data.test_images import BAD, PLACE, TOKEN, ask, row_of, shows
from tests.data.test_images import model as model  # a fixture
from tests.data.test_images import prepare as prepare  # a fixture
from tests.parity.test_images import picture, png

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.quick
OPTIONS: dict[str, Any] = {
    "objective": "grpo",
    "rewards": ("length:1",),
    "max_completion_length": 8,
}
# What is wrong with these is in the answer, which a prompt has not.
OF_ANSWERS = ("has the token that stands for an image", "an answer has an image")


@pytest.fixture
def read(prepare: Callable[..., RunData]) -> Callable[..., RunData]:
    return lambda path, **given: prepare(path, **{**OPTIONS, **given})


def test_a_prompt_whose_images_cannot_be_used_is_left_out_with_the_reason(read, tmp_path):
    kept = [
        (row, says)
        for row, says in BAD
        if says not in OF_ANSWERS or TOKEN in json.dumps(row["messages"][:-1])
    ]
    assert len(BAD) - 3 < len(kept) < len(BAD)
    rows = [shows("a.png"), *(row for row, _ in kept), shows("a.png")]
    data = read(write_jsonl(tmp_path / "rows.jsonl", rows), max_bad_rows=0.95)
    assert [prompt.row_number for prompt in data.prompts] == [1, len(rows)]
    assert data.prompts[0].images.hex_names == data.prompts[1].images.hex_names
    rejected = zip(data.rejected, kept, strict=True)
    for number, ((place, reason), (_, says)) in enumerate(rejected, start=2):
        assert place.endswith(f"rows.jsonl:{number}")
        assert re.search("no room" if "no room" in says else says, reason)
    assert not (tmp_path / "started").exists()


def test_prompts_have_the_images_and_tokens_of_supervised_rows(read, prepare, tmp_path):
    row = {"question": "who?", "image": {"bytes": png(picture(30, 20, seed=2)), "path": None}}
    answered = {**row, "answer": "go on"}
    chats = [row_of(ask("so<image>who?"), "a.png"), row_of(ask([{**PLACE, "path": "a.png"}]))]
    tables = [
        write_parquet(tmp_path / "rows.parquet", [answered]),
        write_jsonl(tmp_path / "chats.jsonl", [*chats, row_of(ask("hi"))]),
    ]
    for path in tables:
        prompts = read(path).prompts
        rows = prepare(path).train
        assert prompts.rows.images.sizes.tolist() == rows.images.sizes.tolist()
        assert prompts.rows.images.hex_names == rows.images.hex_names
        for number, prompt in enumerate(prompts):
            ids = rows[number].input_ids.tolist()
            assert ids[: len(prompt.ids)] == prompt.ids and len(prompt.ids) < len(ids)
    # Beside the prompt, an image in a table would be in the cache a second time.
    assert prompts[0].columns["images"] == [] == read(tables[0]).prompts[0].columns["images"]


def test_cached_prompts_equal_and_are_read_again_if_an_image_changes(read, tmp_path, monkeypatch):
    rows = [shows("a.png"), row_of(ask("hi")), shows("cut.png"), row_of(ask("a<image>b"), "a.png")]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    first = read(path, max_bad_rows=0.5)
    cached = read(path, max_bad_rows=0.5)
    assert not cached.prompts.rows.images.names.flags.writeable
    with monkeypatch.context() as patched:
        patched.setattr(prompt_cache, "_path_of", lambda *_: Path("/dev/null/file"))
        direct = read(path, max_bad_rows=0.5)
    assert first.identity == cached.identity == direct.identity
    assert [*map(repr, cached.prompts)] == [*map(repr, direct.prompts)]
    assert [len(prompt.images) for prompt in cached.prompts] == [1, 0, 1]
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(tmp_path / "cut.png")
    assert len(read(path, max_bad_rows=0.5).prompts) == 3  # to the other ranks of this start
    later = (tmp_path / "cut.png").stat().st_mtime + 100
    monkeypatch.setattr(verified_stamps.psutil.Process, "create_time", lambda self: later)
    changed = read(path, max_bad_rows=0.5)
    assert len(changed.prompts) == 4 and changed.identity != first.identity


def test_equal_prompts_with_other_images_are_no_duplicates(read, tmp_path):
    (tmp_path / "b.png").write_bytes(png(picture(30, 20, seed=3)))
    rows = [{"messages": ask("<image>?"), "images": [name]} for name in ("a.png", "b.png", "a.png")]
    data = read(write_jsonl(tmp_path / "rows.jsonl", rows), drop_duplicates=True)
    assert data.prompts[0].ids == data.prompts[1].ids and data.train_rows.tolist() == [0, 1]


def test_images_stay_refused_in_environments(read, prepare, tmp_path):
    from fsdp_qlora.data.prompt_rows import _with_tools
    from fsdp_qlora.data.text import chats

    with pytest.raises(ValueError, match="images: episodes in environments are of text alone"):
        _with_tools(chats.read_turns(shows("a.png"), "messages"), [])


SIZES = """
def sizes(completions, images, **_):
    return [sum(image.width for image in shown) for shown in images]
"""


def test_reward_functions_get_the_images_that_the_model_sees(read, tmp_path):
    turned = Image.Exif()
    turned[274] = 6  # by a quarter
    picture(40, 20, seed=4).save(tmp_path / "turned.jpg", exif=turned)
    rows = [row_of(ask("<image><image>"), "a.png", "turned.jpg"), row_of(ask("hi"))]
    data = read(write_jsonl(tmp_path / "rows.jsonl", rows))
    (tmp_path / "own.py").write_text(SIZES)
    answers = answers_of_prompts([*data.prompts], [Completion([5], True)] * 2, str)
    scorer = Scorer([f"{tmp_path / 'own.py'}:sizes"], zero_on_error=False, seconds=60)
    scorer.start()
    values = scorer.score(reward_arguments(answers), [1, 2])
    scorer.close()
    assert values == {"sizes": [30 + 20, 0]}
