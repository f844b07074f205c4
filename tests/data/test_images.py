"""Rows with images: where they are found, what is left out, and how they are kept."""

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from fsdp_qlora import api
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data import row_reader
from fsdp_qlora.data.batches import pieces
from fsdp_qlora.data.content import FOLDER
from fsdp_qlora.data.run_data import RunData, read_rows
from fsdp_qlora.data.text import chats
from fsdp_qlora.data.text.image_processor import ImageProcessor
from fsdp_qlora.data.text.image_store import are_as_kept, keep_all, load
from fsdp_qlora.planning.reading import pick_data
from fsdp_qlora.utils import verified_stamps
from fsdp_qlora.utils.errors import RankError, UserError
from tests.data.rows import write_jsonl, write_parquet
from tests.parity.test_images import gemma3, make_multimodal, picture, png

Image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.quick
PLACE = {"type": "image"}
OPENAI_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}}


def ask(content: Any, answer: Any = "go on") -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


def row_of(turns: list[dict[str, Any]], *images: Any) -> dict[str, Any]:
    """The columns of a row, without one for images if it has none."""
    return {"messages": turns, "images": [*images]} if images else {"messages": turns}


def shows(image: str) -> dict[str, Any]:
    """A row whose question shows an image."""
    return row_of(ask("<image>who?"), image)


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


# The columns of a row -> what its first turn shows, and its images.
SHOWN: dict[str, tuple[dict[str, Any], list[dict[str, str]] | str, list[Any]]] = {
    "in the text": (
        {"messages": ask("so<image>who?"), "images": ["a.png"]},
        [text("so"), PLACE, text("who?")],
        [Path("d/a.png")],
    ),
    "one alone": (
        {"messages": ask("<image>who?"), "images": "a.png"},
        [PLACE, text("who?")],
        [Path("d/a.png")],
    ),
    "without a place": (
        {"messages": ask("who?"), "images": ["/a", "b"]},
        [PLACE, PLACE, text("who?")],
        [Path("/a"), Path("d/b")],
    ),
    "parts without one": (
        {"messages": ask([text("so"), PLACE]), "images": [{"bytes": b"x"}]},
        [text("so"), PLACE],
        [b"x"],
    ),
    "parts with one": (
        {"messages": ask([{**PLACE, "image": "a.png"}])},
        [PLACE],
        [Path("d/a.png")],
    ),
    "OpenAI": ({"messages": ask([OPENAI_IMAGE])}, [PLACE], [b"x"]),
    "datasets": (row_of(ask("<image>"), {"path": "a.png", "bytes": b"x"}), [PLACE], [b"x"]),
    "none": ({"messages": ask("who?"), "images": []}, "who?", []),
}


@pytest.mark.parametrize("name", SHOWN)
def test_images_are_found_in_the_columns_datasets_use(name):
    row, first, images = SHOWN[name]
    chat = chats.read_turns({**row, FOLDER: "d"}, "messages")
    assert chat.messages[0]["content"] == first and list(chat.images) == images
    assert chat.messages[1]["content"] == ([text("go on")] if images else "go on")


TOKEN = "<image_soft_token>"
LONG = "so " * 150 + "<image>"
# The image of a row whose question shows one -> why it is left out.
BAD_IMAGES = {
    "b.png": "the image .*b.png cannot be read, or is no image .No such file",
    "cut.png": "the image .*cut.png cannot be read, or is no image",
    "rows.jsonl": "rows.jsonl cannot be read, or is no image",
    "https://a/b.png": "image 1: https://a/b.png is a URL. Download",
    "pipe.png": "pipe.png cannot be read, .*it is not a file but a folder, a pipe",
    "/dev/zero": "/dev/zero cannot be read, .*it is not a file but",
    "zero.png": "zero.png cannot be read, .*it is not a file but",
    "/proc/kmsg": "/proc/kmsg cannot be read, or is no image",
    "long.png": "long.png cannot be read, .*it has 129 MiB, more than 128",
    "gs.png": r"gs.png cannot be read, .*\(cannot identify image file\)",
    "wide.png": "with it the row has more than 44 megapixels; FSDP_QLORA_MAX_ROW_MIB raises that",
    "deep.png": "of mode I;16.*; convert it to 8 bits",
    "float.tiff": "of mode F; convert it to 8 bits",
}
# The columns of a row, and why it is left out.
BAD: list[tuple[dict[str, Any], str]] = [
    *((shows(image), says) for image, says in BAD_IMAGES.items()),
    (row_of(ask("<image><image>"), "a.png"), "turn 1 shows more images than the 1 of the row"),
    (row_of(ask("<image>?"), "a.png", "a.png"), "has 2 images, and its messages show 1 of them"),
    (row_of(ask("who?", [{**PLACE, "image": "a.png"}])), "an answer has an image"),
    (row_of(ask([{**PLACE, "image": "data:,e"}])), "turn 1: an image is not base64"),
    (row_of([*ask("who?"), *ask(LONG)], "a.png"), "no room for a response"),
    (
        row_of(ask("<image><image>"), "half.png", "half.png"),
        "half.png .*with it the row has more than 44",
    ),
    (row_of(ask(f"<image>a {TOKEN}?"), "a.png"), "has the token that stands for an image"),
    (row_of(ask(f"a {TOKEN}?")), "has the token that stands for an image"),
    (row_of(ask("<image>who?", TOKEN), "a.png"), "has the token that stands for an image"),
    (
        row_of(ask("<image><start_of_image>"), "a.png"),
        "template shows 2 of the row's 1 images",
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_multimodal(tmp_path_factory.mktemp("gemma3"), "gemma3")
    gemma3(folder)
    return folder


def make_hostile(folder: Path) -> None:
    """Files that are no images for training, whatever a row says."""
    os.mkfifo(folder / "pipe.png")
    (folder / "zero.png").symlink_to("/dev/zero")
    (folder / "gs.png").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
    )
    with (folder / "long.png").open("wb") as file:
        file.truncate(129 * 2**20)
    Image.new("1", (9000, 5000)).save(folder / "wide.png")
    Image.new("1", (5000, 5000)).save(folder / "half.png")
    Image.fromarray(np.arange(0, 60000, 100, dtype=np.uint16).reshape(20, 30)).save(
        folder / "deep.png"
    )
    Image.fromarray(np.linspace(0, 1, 600, dtype=np.float32).reshape(20, 30)).save(
        folder / "float.tiff"
    )


@pytest.fixture
def prepare(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunData]:
    """read_rows for the model of images, in a folder with the image a.png and half of one,
    cut.png.
    """
    monkeypatch.setenv("FSDP_QLORA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.png").write_bytes(png(picture(30, 20, seed=0)))
    (tmp_path / "cut.png").write_bytes(png(picture(30, 20, seed=1))[:500])
    make_hostile(tmp_path)
    # as PostScript is drawn by Pillow
    (gs := tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    gs.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    tokenizer = AutoTokenizer.from_pretrained(model)

    def call(path: Path, **given: Any) -> RunData:
        config = TrainConfig(dataset=(str(path),), **{"context_length": 300, **given})
        options = pick_data(config, ImageProcessor.find(model, "model"))
        return read_rows(tokenizer, options, vocab_size=len(tokenizer))

    return call


def as_taught(row: dict[str, Any], objective: str) -> dict[str, Any]:
    """The columns of a chat for an objective that learns from given answers."""
    if objective == "sft":
        return row
    *prompt, answer = row["messages"]
    columns = {name: value for name, value in row.items() if name != "messages"}
    if objective == "kto":
        return {**columns, "prompt": prompt, "completion": [answer], "label": True}
    return {**columns, "prompt": prompt, "chosen": [answer], "rejected": "stop"}


@pytest.mark.parametrize("objective", ["sft", "dpo", "kto"])
def test_a_row_whose_images_cannot_be_used_is_left_out_with_the_reason(
    objective, prepare, tmp_path
):
    rows = [shows("a.png"), *(row for row, _ in BAD), shows("a.png")]
    path = write_jsonl(tmp_path / "rows.jsonl", [as_taught(row, objective) for row in rows])
    data = prepare(path, max_bad_rows=0.95, objective=objective)
    assert data.train.row_numbers.tolist() == [1, len(rows)] and len(data.train.images) == 2
    for number, ((place, reason), (_, says)) in enumerate(
        zip(data.rejected, BAD, strict=True), start=2
    ):
        assert place.endswith(f"rows.jsonl:{number}")
        assert re.search(says, reason)
    assert not (tmp_path / "started").exists()
    with pytest.raises(UserError, match=r"b\.png cannot be read"):
        prepare(path, objective=objective)


ROWS_OF_TEXT = [
    {"instruction": f"a {TOKEN}?", "output": "go on"},
    {"text": f"{TOKEN} " * 200},
    {"prompt": "so", "chosen": " go", "rejected": f" {TOKEN}"},
]


@pytest.mark.parametrize("row", ROWS_OF_TEXT, ids=lambda row: next(iter(row)))
def test_the_models_token_for_images_is_refused_in_text(row, prepare, tmp_path):
    objective = "dpo" if "chosen" in row else "sft"
    with pytest.raises(
        UserError,
        match=r"rows.jsonl:1: its text has the token that stands for an image",
    ):
        prepare(write_jsonl(tmp_path / "rows.jsonl", [row]), objective=objective)


def test_tokens_of_images_are_never_learned(prepare, model, tmp_path):
    row = {"messages": [*ask("who?"), *ask("<image>so<image>")], "images": ["a.png", "a.png"]}
    data = prepare(write_jsonl(tmp_path / "rows.jsonl", [row]), learn="all").train
    tokenizer = AutoTokenizer.from_pretrained(model)
    shown = np.isin(data.input_ids, tokenizer.convert_tokens_to_ids([TOKEN, "<start_of_image>"]))
    assert shown.sum() == 10 and not data.learned[shown].any()
    written = tokenizer.decode(data.input_ids[data.learned])
    assert (
        "user" in written
        and ("go on</s>") in written
        and data.images.sizes.tolist() == [[2, 2 * 3 * 28 * 28]]
    )


def test_images_are_read_from_tables_and_instruction_rows(prepare, tmp_path):
    row = {
        "question": "who?",
        "answer": "go on",
        "image": {"bytes": png(picture(30, 20, seed=2)), "path": None},
    }
    data = prepare(write_parquet(tmp_path / "rows.parquet", [row] * 2)).train
    assert data.images.counts.tolist() == [1, 1] and len({*map(bytes, data.images.names)}) == 1
    assert load(bytes(data.images.names[0])).tobytes() == picture(30, 20, seed=2).tobytes()
    assert data[1].images.names.tolist() == data.images.names[1:].tolist()


def test_cached_rows_are_rebuilt_if_an_image_changes(prepare, tmp_path, monkeypatch):
    rows = [shows(name) for name in ("a.png", "cut.png")]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    first = prepare(path, max_bad_rows=0.5).train
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(tmp_path / "cut.png")
    assert len(prepare(path, max_bad_rows=0.5).train) == 1  # to the other ranks of this start
    monkeypatch.setattr(
        verified_stamps.psutil.Process,
        "create_time",
        lambda self: os.stat(tmp_path / "cut.png").st_mtime + 100,
    )
    assert len(prepare(path, max_bad_rows=0.5).train) == 2  # to another
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(tmp_path / "a.png")
    with pytest.raises(RankError, match=r"a\.png was read before, and now: it has changed"):
        load(bytes(first.images.names[0]))
    assert not are_as_kept([bytes(first.images.names[0])])
    again = prepare(path).train
    assert (
        again.digest != first.digest
        and bytes(again.images.names[0]) == keep_all([tmp_path / "a.png"])[0][0]
    )
    os.remove(tmp_path / "a.png")
    with pytest.raises(RankError, match="No such file"):
        load(bytes(again.images.names[0]))


def test_relative_paths_are_of_the_rows_folder_or_the_current_one(prepare, tmp_path, monkeypatch):
    rows = [shows("a.png")] * 2
    (other := tmp_path / "other").mkdir()
    (other / "a.png").write_bytes(png(picture(30, 20, seed=2)))
    first, second = (
        prepare(write_jsonl(folder / "rows.jsonl", rows)).train.images.names
        for folder in (tmp_path, other)
    )
    assert bytes(first[0]) != bytes(second[0])  # although the rows are in the cache
    monkeypatch.chdir(other)
    assert bytes(prepare(Path(api._in_file(rows))).train.images.names[0]) == bytes(second[0])


def test_a_model_of_text_refuses_images_by_the_columns_name(prepare, tmp_path, monkeypatch):
    monkeypatch.setattr(ImageProcessor, "find", lambda *_: None)
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": ask("who?"), "image": "a.png"}])
    with pytest.raises(
        UserError, match="image: only text can be trained on; --columns ignore=image trains without"
    ):
        prepare(path)
    assert not len(prepare(path, columns=("ignore=image",)).train.images)
    path.write_text(json.dumps({"messages": ask([{**PLACE, "image": "a.png"}])}) + "\n")
    with pytest.raises(UserError, match="images: only text can be trained on with this model"):
        prepare(path)


def test_images_in_pieces_are_made_again_in_the_piece_that_lacked_one(
    prepare, tmp_path, monkeypatch
):
    rows = [row_of(ask("hi"))] * 4 + [shows(name) for name in ("a.png", "cut.png", "a.png")] * 3
    path = write_jsonl(tmp_path / "rows.jsonl", rows[:-2])
    monkeypatch.setattr(row_reader, "ROWS_PER_BATCH", 2)

    def read(cache: str, per_piece: int) -> RunData:
        monkeypatch.setenv("FSDP_QLORA_CACHE", str(tmp_path / cache))
        monkeypatch.setattr(pieces, "MOST_ENTRIES", per_piece)
        return prepare(path, max_bad_rows=0.5)

    def pieces_of(cache: str) -> list[tuple[str, int]]:
        found = sorted((tmp_path / cache).rglob("0*.safetensors"))
        return [(file.name, file.stat().st_mtime_ns) for file in found]

    expected = read("one", 1000).train
    found = read("pieces", 4).train
    assert found.digest == expected.digest and len(pieces_of("pieces")) == 3
    assert found.images.sizes.tolist() == expected.images.sizes.tolist()
    assert len(found.images) == 5 and not found.images.counts[:4].any()
    before = pieces_of("pieces")
    (tmp_path / "cut.png").write_bytes(png(picture(30, 20, seed=1)))
    later = time.time() + 1
    monkeypatch.setattr(verified_stamps.psutil.Process, "create_time", lambda self: later)
    again = read("pieces", 4).train
    assert again.digest == read("one", 1000).train.digest != found.digest
    assert len(again.images) == 7
    changed = [new != old for new, old in zip(pieces_of("pieces"), before, strict=True)]
    assert changed == [False, True, True]  # both had a row with the image that could not be read
