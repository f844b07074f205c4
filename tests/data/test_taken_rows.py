"""A run of few steps takes rows of a large dataset from evenly spaced places."""

import dataclasses
import json
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tqdm import tqdm

from fsdp_qlora.checkpoint.checkpoint import STATE
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data import row_reader, taken_rows
from fsdp_qlora.data.batches import pieces, tokenization
from fsdp_qlora.data.run_data import RunData, read_rows
from fsdp_qlora.data.sources import places
from fsdp_qlora.data.sources.places import at_places
from fsdp_qlora.data.sources.source import find_source, place_after
from fsdp_qlora.data.taken_rows import NeededRows
from fsdp_qlora.planning.reading import earlier_run, pick_data
from fsdp_qlora.planning.run_rows import make_schedule, needed_rows
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.run_files import RUN
from tests.data.conftest import SharedWorker
from tests.data.rows import TOKENIZER
from tests.data.test_going_on import SOURCES, told
from tests.data.test_pieces import folder_of, hashes

pytestmark = pytest.mark.quick

COUNT = 140_000
STEPS = 25
PER_STEP = 4


def text_of(number: int) -> str:
    return f"{number} " + "ab" * (number % 7)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(map("{}\n".format, map(json.dumps, rows))))
    return path


def save(path: Path, rows: list[dict[str, Any]]) -> Path:
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    datasets.Dataset.from_dict(columns).save_to_disk(str(path))
    return path


def write_table(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=9000)
    return path


KINDS: dict[str, Callable[[Path, list[dict[str, Any]]], Path]] = {
    "rows.jsonl": write_lines,
    "rows.parquet": write_table,
    "saved": save,
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A dataset of COUNT rows, each with its number in its text."""
    folder = tmp_path_factory.mktemp("large")

    def of_kind(name: str) -> Path:
        path = folder / name
        if not path.exists():
            KINDS[name](path, [{"text": text_of(number)} for number in range(COUNT)])
        return path

    return of_kind


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> Callable[..., RunData]:
    """The rows of a run of STEPS steps, with a cache of the test's own."""
    monkeypatch.setattr("fsdp_qlora.data.run_data.TemplateWorker", SharedWorker)
    caplog.set_level(logging.INFO, "fsdp_qlora")

    def call(*sets: object, cache: str = "cache", taken: Any = None, **given: Any) -> RunData:
        monkeypatch.setenv("FSDP_QLORA_CACHE", str(tmp_path / cache))
        usual = {"context_length": 64, "max_steps": STEPS, "gradient_accumulation_steps": PER_STEP}
        config = TrainConfig(dataset=tuple(map(str, sets)), **{**usual, **given})
        count = needed_rows(config, 1)
        needed = None if count is None else NeededRows(count, taken)
        data = read_rows(TOKENIZER, pick_data(config), vocab_size=2**31, needed=needed)
        if "objective" not in given:
            assert make_schedule(config, data, 1).total_steps == config.max_steps
        return data

    return call


def numbers_in(data: RunData, rows: Any = slice(None)) -> np.ndarray:
    """The numbers in the rows' texts."""
    found = []
    for row in np.arange(len(data.train))[rows]:
        start, stop = data.train.offsets[row : row + 2]
        words = TOKENIZER.decode(data.train.input_ids[start:stop], skip_special_tokens=True)
        assert words.strip() == text_of(int(words.split()[0])).strip()
        found.append(int(words.split()[0]))
    return np.array(found)


def said(caplog: Any, what: str) -> list[str]:
    return [line for line in caplog.messages if what in line]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_come_from_the_whole_dataset_alike(kind, read, large, caplog):
    data = read(large(kind))
    numbers = numbers_in(data)
    assert 1000 < len(numbers) < 1300 and (np.diff(numbers) > 0).all()
    assert numbers[0] < 200 and numbers[-1] > COUNT - 200
    tenths = np.bincount(numbers * 10 // COUNT, minlength=10)
    assert tenths.min() > 0.7 * tenths.mean()
    assert np.diff(numbers).max() < 8 * COUNT / 1000
    [line] = said(caplog, "Rows taken")
    assert "from 1,000 places spread over it, for --max_steps (100 rows)" in line
    assert data.provenance["taken"] and data.reports[0].num_rows == len(numbers)
    # The same again, and from the cache.
    assert read(large(kind), cache="other").identity == data.identity


def test_the_number_of_a_line_is_that_of_its_first_byte(read, large):
    data = read(large("rows.jsonl"))
    for row in (0, 500, len(data.train) - 1):
        number = int(data.train.row_numbers[row])
        found = subprocess.run(
            f"tail -c +{number} {large('rows.jsonl')} | head -n 1",
            shell=True,
            capture_output=True,
            check=True,
        )
        assert json.loads(found.stdout)["text"].split()[0] == str(numbers_in(data, [row])[0])


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "saved"])
@pytest.mark.parametrize("share", [0.15, 0.5, 0.9])
def test_reading_at_places_goes_on_behind_every_row(name, share, tmp_path, monkeypatch):
    monkeypatch.setattr(places, "NUM_PLACES", 5)
    folder = tmp_path / "sets"
    folder.mkdir()
    path = SOURCES[name](folder / name)
    if name != "saved":
        SOURCES[name](folder / f"b{path.suffix}")  # two files
        path = folder
    whole = {str(entry.row) for entry in find_source(str(path)).entries()}
    source = at_places(find_source(str(path)), share)
    entries = list(source.entries())
    expected = told(entries)
    assert 0 < len(expected) <= 2 * len(whole) and {row for _, _, row in expected} <= whole
    numbers = [number for _, number, _ in expected]
    assert numbers == sorted(set(numbers))
    for read, entry in enumerate(entries, start=1):
        again = at_places(find_source(str(path)), share)
        found = again.entries(after=place_after(entry, read))
        assert told(found) == expected[read:]


def test_every_row_is_as_likely_as_another(tmp_path):
    path = write_lines(
        tmp_path / "rows.jsonl",
        [{"text": "a" * (200 if number % 2 else 10)} for number in range(20_000)],
    )
    rows = [len(entry.row["text"]) for entry in at_places(find_source(str(path)), 0.3).entries()]
    assert 0.27 * 20_000 < len(rows) < 0.33 * 20_000
    assert 0.45 < rows.count(200) / len(rows) < 0.55


def _read_alone(read: Any, path: Path, cache: str) -> None:
    # A progress bar's lock is shared by forked processes, and one that is killed would keep it.
    tqdm.set_lock(threading.RLock())
    read(path, cache=cache)


@pytest.mark.parametrize("kind", ["rows.jsonl", "rows.parquet"])
def test_a_preparation_at_places_goes_on_after_a_kill(kind, read, large, tmp_path, monkeypatch):
    monkeypatch.setattr(row_reader, "ROWS_PER_BATCH", 50)
    monkeypatch.setattr(pieces, "MOST_ENTRIES", 150)
    path = large(kind)
    expected = read(path, cache="whole")
    whole = hashes(folder_of(tmp_path / "whole"))
    assert len(whole) > 7
    context = multiprocessing.get_context("fork")
    kept = set()
    for moment in range(5):
        cache = f"killed{moment}"
        victim = context.Process(target=_read_alone, args=(read, path, cache))
        victim.start()
        while victim.is_alive() and len([*(tmp_path / cache).rglob("0*.safetensors")]) < moment:
            time.sleep(0.001)
        time.sleep(moment % 3 / 100)
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        kept.add(len([*(tmp_path / cache).rglob("0*.safetensors")]))
        assert read(path, cache=cache).train.digest == expected.train.digest
        assert hashes(folder_of(tmp_path / cache)) == whole
    assert len(kept) > 2


@pytest.mark.parametrize("kind", ["rows.jsonl", "rows.parquet"])
def test_too_few_rows_that_are_left_make_it_read_all(kind, read, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(taken_rows, "_LEAST_ROWS", 4000)
    rows = [{"text": f"{number % 50 if number % 20 else number}"} for number in range(6000)]
    path = KINDS[kind](tmp_path / kind, rows)
    data = read(path, drop_duplicates=True, max_steps=12)
    assert 1000 < data.reports[0].num_rows < 1200 and 48 < len(data.train_rows) < 120
    caplog.clear()
    data = read(path, drop_duplicates=True, max_steps=70)
    assert "taken" not in data.provenance and data.reports[0].num_rows == 6000
    assert len(said(caplog, "too few for --max_steps (280 rows): all rows are read")) == 1


def test_bad_rows_that_are_allowed_leave_enough(read, tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    lines = ['{"text": "good"}\n' if number % 10 < 3 else "bad\n" for number in range(140_000)]
    path.write_text("".join(lines))
    data = read(path, max_bad_rows=0.8, max_steps=500)
    assert 2000 < len(data.train_rows) < 5000 and not said(caplog, "all rows are read")
    [place, reason] = data.reports[0].places()[0]
    found = re.fullmatch(r".*rows\.jsonl byte (\d+)", place)
    assert found and "each line must be one JSON object" in reason
    assert path.read_bytes()[int(found[1]) - 1 :].startswith(b"bad\n")
    with pytest.raises(UserError, match="cannot be used"):
        read(path, max_steps=2)


def test_rows_in_their_own_order_are_the_first_ones(read, large, caplog):
    numbers = numbers_in(read(large("rows.jsonl"), shuffle=False))
    assert numbers.tolist() == list(range(len(numbers)))
    assert len(said(caplog, f"Rows taken: the first {len(numbers):,} of")) == 1


def test_datasets_stay_in_their_shares(read, large, tmp_path, monkeypatch):
    third = KINDS["rows.parquet"](
        tmp_path / "third.parquet", [{"text": text_of(number)} for number in range(COUNT // 2)]
    )
    data = read(large("rows.jsonl"), third)
    counts = [report.num_used for report in data.reports]
    assert 1000 < sum(counts) < 1300 and counts[0] / counts[1] == pytest.approx(2, rel=0.15)
    monkeypatch.setattr(taken_rows, "_LEAST_ROWS", 4000)
    many = write_lines(tmp_path / "many.jsonl", [{"text": f"{n}"} for n in range(5000)])
    few = write_lines(tmp_path / "few.jsonl", [{"text": "a"}] * 30)
    data = read(f"{many}:0.75", f"{few}:0.25", num_epochs=50)
    whole = read(f"{many}:0.75", f"{few}:0.25", num_epochs=50, taken=())
    assert [each["share"] is None for each in data.provenance["taken"]] == [False, True]
    assert data.mixture.rows_per_epoch == whole.mixture.rows_per_epoch == (90, 30)


def test_held_out_rows_are_cut_from_those_that_are_read(read, large):
    data = read(large("rows.jsonl"), eval_fraction=0.5)
    assert len(data.eval_rows) == pytest.approx(len(data.train_rows), abs=1)
    assert len(data.train_rows) > STEPS * PER_STEP


@pytest.mark.parametrize("objective", ["dpo", "grpo"])
def test_pairs_and_prompts_are_taken_too(objective, read, tmp_path):
    path = write_lines(
        tmp_path / "rows.jsonl",
        [{"prompt": f"{n}", "chosen": "yes", "rejected": "no"} for n in range(COUNT)],
    )
    given: dict[str, Any] = {"objective": "dpo"}
    if objective == "grpo":
        given = {"objective": "grpo", "rewards": ("number",), "num_generations": 4}
        given |= {"max_completion_length": 8, "num_iterations": 2}
        (tmp_path / "p.jsonl").write_text(path.read_text().replace("chosen", "other"))
        path = tmp_path / "p.jsonl"
    config = TrainConfig(max_steps=9, gradient_accumulation_steps=8, **given)
    assert needed_rows(config, 2) == (144 if objective == "dpo" else 20)
    data = read(path, max_steps=9, gradient_accumulation_steps=8, **given)
    assert len(data.train_rows) > 72 and len(data.known_rows) < 4000 and data.provenance["taken"]


@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": -1},
        {"auto": True},
        {"context_parallel_size": "auto"},
        {"objective": "distill", "teacher": "another"},
    ],
    ids=str,
)
def test_runs_whose_rows_are_not_known_before_need_all(options):
    assert needed_rows(TrainConfig(**{"max_steps": 5, **options}), 1) is None


def test_parts_of_datasets_and_small_ones_are_read_whole(read, large, tmp_path, monkeypatch):
    tokenize = tokenization.tokenize_batch
    taken: list[object] = []

    def is_whole(*sets: object, **given: Any) -> bool:
        config = TrainConfig(dataset=tuple(map(str, sets)), context_length=64, **given)
        needed = NeededRows(100)
        with monkeypatch.context() as patch:
            patch.setattr(tokenization, "tokenize_batch", tokenize)
            data = read_rows(TOKENIZER, pick_data(config), vocab_size=2**31, needed=needed)
        taken.append(data.provenance.get("taken"))
        return not taken[-1]

    path = large("rows.jsonl")
    monkeypatch.setenv("FSDP_QLORA_CACHE", str(tmp_path / "cache"))
    assert is_whole(f"{path}[:300]") and is_whole(path, dataset_samples=300)
    few = write_lines(tmp_path / "few.jsonl", [{"text": f"{n}"} for n in range(3000)])
    assert is_whole(few) and is_whole(few, few, shuffle=False)
    array = tmp_path / "rows.json"
    array.write_text(json.dumps([{"text": "a"}] * 300))
    assert is_whole(array)
    assert not is_whole(path)


def test_a_run_of_before_keeps_all_rows_and_a_part_stays(read, large, tmp_path):
    part = read(large("rows.jsonl"))
    again = read(large("rows.jsonl"), taken=part.provenance["taken"], max_steps=24)
    assert again.identity == part.identity
    small = write_lines(tmp_path / "rows.jsonl", [{"text": f"{n}"} for n in range(900)])
    whole = read(small, taken=())
    assert "taken" not in whole.provenance and len(whole.train) == 900
    assert dataclasses.asdict(whole.reports[0])["parts"][0]["unit"] == "line"


@pytest.mark.parametrize("kind", ["rows.jsonl", "rows.parquet"])
@pytest.mark.parametrize("turns", [2, 10, 50])
def test_rows_that_come_in_turns_are_met_alike(kind, turns, tmp_path):
    rows = [{"text": f"{number % turns:02d}"} for number in range(100_000)]
    source = at_places(find_source(str(KINDS[kind](tmp_path / kind, rows))), 0.02)
    found = [int(str(entry.row["text"])) for entry in source.entries()]
    counts = np.bincount(found, minlength=turns)
    assert len(found) == pytest.approx(2000, rel=0.05)
    assert counts.min() > 0.7 * counts.mean() and counts.max() < 1.3 * counts.mean()


def test_a_start_that_may_continue_a_run_takes_what_it_took(tmp_path):
    run, step, other, before = (tmp_path / name for name in ("run", "step", "other", "before"))
    part = [{"share": 0.25, "first": None}]
    old = {"options": {"dataset": ["a.jsonl"], "max_steps": 6}}
    record = {**old, "taken": part}
    for folder, name, content in (
        (run, RUN, record),
        (step, STATE, {"about": record}),
        (before, RUN, old),
    ):
        folder.mkdir()
        (folder / name).write_text(json.dumps(content))

    def kept(output_dir: Path, **given: Any) -> Any:
        usual = {"dataset": ("a.jsonl",), "max_steps": 6}
        config = TrainConfig(output_dir=str(output_dir), **{**usual, **given})
        return earlier_run(config).decisions().taken

    assert kept(run) == kept(other, resume=str(run)) == kept(other, resume=str(step)) == part
    assert kept(run, dry_run=True) == kept(run, resume="auto:replace") == part
    assert kept(before) == [] and kept(other) is None and kept(run, resume="off") is None
    # Another run, which replaces it or is refused.
    assert kept(run, max_steps=7) is None
    assert kept(run, resume="auto:replace", dataset=("b.jsonl",)) is None


def test_rows_of_a_run_that_would_be_too_few_for_another_are_said(read, large, caplog):
    part = read(large("rows.jsonl")).provenance["taken"]
    with pytest.raises(AssertionError):
        read(large("rows.jsonl"), taken=part, max_steps=1000)
    assert said(caplog, "a run that begins anew on these ranks would end earlier")


@pytest.mark.parametrize(("num_bytes", "is_part"), [(2**20, True), (2**31, False), (None, False)])
def test_a_hub_dataset_is_divided_if_each_machine_has_a_table(
    num_bytes, is_part, read, monkeypatch
):
    monkeypatch.setattr(taken_rows, "_LEAST_ROWS", 4000)
    table = datasets.Dataset.from_dict({"text": [text_of(number) for number in range(6000)]})
    table.info.download_size = num_bytes
    monkeypatch.setattr("datasets.load_dataset", lambda name, split: table)
    monkeypatch.setattr("fsdp_qlora.data.sources.source.ask_hub", lambda *_: None)
    monkeypatch.setattr("fsdp_qlora.data.sources.source.large_split", lambda *_, **__: None)
    data = read("owner/rows")
    assert ("taken" in data.provenance) == is_part
    assert (data.reports[0].num_rows < 1300) == is_part


def test_a_recorded_part_that_cannot_be_read_so_is_chosen_anew(read, tmp_path, large):
    array = tmp_path / "rows.json"
    array.write_text(json.dumps([{"text": f"{number}"} for number in range(300)]))
    part = [{"share": 0.25, "first": None}]
    assert len(read(array, taken=part).train) == 300
    assert len(read(large("rows.jsonl"), taken=part * 2).train) < 1300
