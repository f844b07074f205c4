"""Prompts in the cache: equal to those of the dataset, read once, mapped, and made again."""

import json
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data import prompt_cache
from fsdp_qlora.data.batches.rows import join_completions
from fsdp_qlora.data.content import ENDED_WORKERS, Chat
from fsdp_qlora.data.held_out import held_out_prompts
from fsdp_qlora.data.prompt_file import PromptFile
from fsdp_qlora.data.prompt_rows import PromptRows
from fsdp_qlora.data.prompt_texts import NotEncodable, decode, encode
from fsdp_qlora.data.prompts import Beside
from fsdp_qlora.data.run_data import RunData, read_rows
from fsdp_qlora.distributed.ranks import derive_seed
from fsdp_qlora.planning.reading import pick_data
from fsdp_qlora.utils.errors import UserError
from tests.helpers.run import on_ranks
from tests.helpers.tokenizers import make_tokenizer
from tests.rollouts.test_prompts import ASKED, CHATML, TOOLS

pytestmark = pytest.mark.quick

DAY = datetime(2026, 3, 4, 5, 6, 7, 8)
# Types of Arrow -> a value of them.
COLUMNS: dict[str, tuple[Any, pyarrow.DataType]] = {
    "date": (date(2026, 3, 4), pyarrow.date32()),
    "time": (time(5, 6, 7, 8), pyarrow.time64("us")),
    "naive": (DAY, pyarrow.timestamp("us")),
    "zoned": (DAY.replace(tzinfo=UTC), pyarrow.timestamp("us", "Europe/Berlin")),
    "fixed": (DAY.replace(tzinfo=UTC), pyarrow.timestamp("us", "+02:00")),
    "instant": (1234567890123456789, pyarrow.timestamp("ns")),
    "elapsed": (timedelta(3, 4, 5), pyarrow.duration("us")),
    "duration": (1234567890123456789, pyarrow.duration("ns")),
    "decimal": (Decimal("1.10"), pyarrow.decimal128(9, 2)),
    "binary": (b"\x00\xff", pyarrow.binary()),
    "nan": (float("nan"), pyarrow.float64()),
    "infinite": (-float("inf"), pyarrow.float64()),
    "dates": ([date(2026, 3, 4), None], pyarrow.list_(pyarrow.date32())),
    "named": ({"$type": "date", "day": None}, pyarrow.struct({"$type": pyarrow.string()})),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tokenizer, and a cache of its own."""
    monkeypatch.setenv("FSDP_QLORA_CACHE", str(tmp_path / "cache"))
    make_tokenizer(tmp_path)
    return tmp_path


def files(folder: Path) -> list[Path]:
    """The files of prompts in the cache."""
    kept = (folder / "cache" / "prompts").glob("*")
    return [path for path in kept if path.suffix != ".lock" and path.stat().st_size > 1024]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(folder: Path, *datasets: str, tools: Any = None, **options: Any) -> RunData:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHATML
    usual = {"max_completion_length": 8, "objective": "grpo", "rewards": ("number",)}
    picked = pick_data(TrainConfig(**{**usual, "dataset": datasets, **options}), tools=tools)
    return read_rows(tokenizer, picked, vocab_size=len(tokenizer))


def odd_rows(folder: Path) -> str:
    """A table with values of all types that JSON lacks."""
    columns = {name: pyarrow.array([value, None], kind) for name, (value, kind) in COLUMNS.items()}
    table = pyarrow.table({"prompt": ["sort", "list"], **columns})
    pyarrow.parquet.write_table(table, folder / "odd.parquet")
    return str(folder / "odd.parquet")


def runs(folder: Path) -> dict[str, dict[str, Any]]:
    """Datasets and options of several kinds of prompts."""
    chats = write(folder / "chats.jsonl", [{"prompt": ASKED, "b": [1.5], "a": 1}, {}] * 4)
    taught = write(
        folder / "taught.jsonl",
        [{"prompt": ASKED, "teacher_system": "think"}, {"prompt": ASKED, "teacher_prompt": "go"}],
    )
    rooms = [{"prompt": ASKED, "environment": name} for name in ("left", "right")]
    texts = write(folder / "texts.jsonl", [{"prompt": f"sort {n}", "answer": n} for n in range(9)])
    sets = {"eval_dataset": (f"a={texts}", f"b={chats}"), "max_bad_rows": 1.0}
    return {
        "odd": {"datasets": [odd_rows(folder)]},
        "several": {"datasets": [chats, texts, odd_rows(folder)], "max_bad_rows": 1.0},
        "held out": {"datasets": [texts, odd_rows(folder)], "eval_fraction": 0.3},
        "sets": {"datasets": [chats, texts], **sets},
        "teacher": {"datasets": [taught], "objective": "distill_on_policy", "rewards": ()},
        "environments": {
            "datasets": [write(folder / "rooms.jsonl", rooms)],
            "tools": {"left": TOOLS, "right": []},
        },
    }


@pytest.mark.parametrize("name", ["odd", "several", "held out", "sets", "teacher", "environments"])
def test_cached_prompts_equal_those_of_the_dataset(name, folder, monkeypatch):
    chosen = runs(folder)[name]
    datasets = chosen.pop("datasets")
    cached = [read(folder, *datasets, **chosen) for _ in range(2)]
    assert len(files(folder)) == len(datasets)
    monkeypatch.setattr(prompt_cache, "_path_of", lambda *_: Path("/dev/null/file"))
    direct = read(folder, *datasets, **chosen)
    prompts = [*direct.prompts]
    assert len(prompts) > 1 and isinstance(direct.prompts.beside[0], Beside)
    seed = derive_seed([prompt.columns for prompt in prompts])
    for data in cached:
        # Types and the order of columns, too.
        assert [*map(repr, data.prompts)] == [*map(repr, prompts)]
        assert [prompt.for_rewards.keys() for prompt in data.prompts] == [
            prompt.for_rewards.keys() for prompt in prompts
        ]
        assert data.identity == direct.identity and data.identity[-1] == seed
        assert not data.prompts.rows.input_ids.flags.writeable
        for part, whole in ((data.lengths, direct.lengths), (data.train_rows, direct.train_rows)):
            assert np.array_equal(part, whole)
    rows = join_completions(
        [prompt.ids for prompt in prompts],
        [()] * len(prompts),
        [prompt.row_number for prompt in prompts],
    )
    assert rows.digest == direct.known_rows.digest == cached[0].known_rows.digest


def test_held_out_rows_of_texts_are_read_as_prompts_once(folder, monkeypatch):
    rows = [{"question": f"sort {n}", "answer": f"list {n}"} for n in range(20)]
    names = [write(folder / f"{name}.jsonl", rows[first:]) for name, first in (("a", 0), ("b", 5))]
    options = {"objective": "sft", "eval_fraction": 0.4, "eval_rewards": ("number",)}
    options |= {"rewards": (), "context_length": 64}
    data = read(folder, *names, **options)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    picked = pick_data(TrainConfig(dataset=tuple(names), **options))

    def held_out() -> dict[str, Any]:
        return dict(
            held_out_prompts(tokenizer, picked, data, vocab_size=len(tokenizer), longest=None)
        )

    first = held_out()
    monkeypatch.setattr(PromptRows, "read", lambda *_: pytest.fail("read again"))
    second = held_out()
    numbers = [prompt.row_number for prompt in first[""]]
    offsets = np.where(data.eval_rows < 20, 0, 20)
    assert numbers == (data.evaluation.row_numbers[data.eval_rows] - offsets).tolist()
    assert [*map(repr, first[""])] == [*map(repr, second[""])] and len(numbers) == 14


def rank_that_reads(folder: str, dataset: str, start: str) -> int:
    """Read prompts, and note each row that is read."""
    read_one = PromptRows.read

    def read_and_note(self: PromptRows, row: Any, of: str) -> Any:
        with (Path(folder) / f"read_{start}").open("a") as file:
            print(row["prompt"], file=file)
        return read_one(self, row, of)

    PromptRows.read = read_and_note  # type: ignore[method-assign]
    data = read(Path(folder), dataset, context_length=32)
    assert [prompt.content for prompt in data.prompts] == [f"sort {n}" for n in range(2500)]
    return 0


def test_one_of_two_ranks_reads_prompts_and_a_second_start_none(folder):
    dataset = write(folder / "rows.jsonl", [{"prompt": f"sort {n}"} for n in range(2500)])
    for start in ("first", "second"):
        statuses, said = on_ranks(
            2, rank_that_reads, (str(folder), dataset, start), folder / f"logs_{start}"
        )
        assert statuses == [0, 0], said
    assert len((folder / "read_first").read_text().splitlines()) == 2500
    assert not (folder / "read_second").exists()


@pytest.mark.parametrize("damage", ["cut", "bit", "empty"])
def test_damaged_prompts_are_made_again(damage, folder, lines):
    dataset = write(folder / "rows.jsonl", [{"prompt": "sort"}, {"prompt": ASKED}] * 500)
    before = [*map(repr, read(folder, dataset).prompts)]
    [file] = files(folder)
    content = file.read_bytes()
    middle = len(content) // 2
    bit = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    file.unlink()  # the first call's prompts are still mapped
    file.write_bytes({"cut": content[:-9], "bit": bit, "empty": b""}[damage])
    assert [*map(repr, read(folder, dataset).prompts)] == before
    assert any("damaged" in line for line in lines) and file.read_bytes() == content


def test_values_that_no_text_keeps_stay_in_memory(folder, caplog):
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    dataset = write(folder / "rows.jsonl", [{"prompt": "sort", "deep": deep}])
    caplog.set_level("DEBUG", "fsdp_qlora")
    data = read(folder, dataset)
    assert data.prompts[0].columns == {"deep": deep} and not files(folder)
    assert "nested too deeply" in caplog.text
    assert data.identity[-1] == derive_seed([{"deep": deep}])


def test_errors_of_the_dataset_are_not_said_to_be_of_the_cache(folder, monkeypatch, caplog):
    dataset = write(folder / "rows.jsonl", [{"prompt": "sort"}])

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(PromptRows, "read", fail)
        with pytest.raises(UserError, match=r"dataset: its rows cannot be read .*Input/output"):
            read(folder, dataset, context_length=64)
    assert "not kept" not in caplog.text
    monkeypatch.setattr(PromptFile, "_append", fail)
    assert len(read(folder, dataset, context_length=64).prompts) == 1
    assert "not kept for the next start" in caplog.text and not files(folder)


def test_rows_left_out_for_ended_workers_are_tried_again(folder, monkeypatch):
    dataset = write(folder / "rows.jsonl", [{"prompt": "sort"}, {"prompt": "list"}])
    tokenize = PromptRows.tokenize

    def reject_one(self: Any, contents: Any, report: Any) -> Any:
        report.reject(2, ENDED_WORKERS)
        return tokenize(self, contents[:1], report)

    with monkeypatch.context() as patch:
        patch.setattr(PromptRows, "tokenize", reject_one)
        assert len(read(folder, dataset, max_bad_rows=1.0).prompts) == 1
    assert not files(folder)
    assert len(read(folder, dataset).prompts) == 2


def test_key_of_prompts_covers_all_that_decides_them(folder):
    taught = [{"prompt": "sort", "teacher_prompt": "list", "other": 1}] * 2
    dataset = write(folder / "rows.jsonl", taught)
    asked = write(folder / "asked.jsonl", [{"prompt": ASKED}])
    distilling = {"objective": "distill_on_policy", "rewards": ()}
    found = []
    for options in (
        {},
        {"max_completion_length": 9},
        {"columns": ("ignore=other",)},
        {"columns": ("own=other",)},
        {"prompt_template": "chat"},
        {"context_length": 63},
        {"dataset_samples": 1},
        {"dataset": (asked,), "tools": {"": TOOLS}},
        {"dataset": (asked,), "tools": {"": []}},
        {**distilling, "teacher": "other/model"},
        distilling,
    ):
        usual = {"context_length": 64}
        found.append(repr(read(folder, dataset, **{**usual, **options}).prompts[0]))
        assert len(files(folder)) == len(found)
    # Another model as the teacher may have a prompt of its own, which grpo does not read.
    assert found[0] != found[-2] != found[2] and "teacher_ids=None" in found[0]
    again = read(folder, dataset, context_length=64, rewards=("length",))
    assert repr(again.prompts[0]) == found[0] and len(files(folder)) == len(found)


VALUES: list[Any] = [
    {"a": (1, (2,), []), "b": {1: None, (2, "x"): True}, "$type": "date", "value": 3},
    {"half": "\ud83d", "two halves": "\ud83d" + "\ude00", "whole": "\U0001f600"},
    {"minus": -0.0, "whole": 1.0, "large": 10**40, "tiny": 5e-324, "yes": True, "one": 1},
    {"uuid": UUID(int=5), "decimals": [Decimal("1E+5"), Decimal("NaN")], "bytes": b""},
]


@pytest.mark.parametrize("columns", VALUES)
def test_texts_of_prompts_keep_values_types_and_order(columns):
    chat = Chat(ASKED, [], (None, 0.5), ("name",), template_kwargs=columns)
    for beside in (
        Beside(ASKED, columns),
        Beside("sort", columns, columns, [3, 4], chat, "left"),
    ):
        assert repr(decode(encode(beside))) == repr(beside)
        assert type(decode(encode(beside))) is Beside


@pytest.mark.parametrize("value", [{1, 2}, object(), np.float64(1), 1j, range(3)])
def test_values_of_other_types_are_refused_and_not_changed(value):
    with pytest.raises(NotEncodable):
        encode(Beside("sort", {"value": value}))
