# ruff: noqa: E501
"""Data as people have it: each file or folder trains, or is refused with what to do."""

import dataclasses
import gzip
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.schedule import Schedule, mix
from fsdp_qlora.data.learning_model import LearningModel, options_for
from fsdp_qlora.data.run_data import RunData, read_rows
from fsdp_qlora.data.sources.dataset_name import DatasetName, parse_name
from fsdp_qlora.data.sources.source import find_source
from fsdp_qlora.planning.reading import earlier_run, pick_data
from fsdp_qlora.utils.errors import UserError
from tests.data.conftest import WORKER, SharedWorker
from tests.data.rows import rows_of, write_csv, write_jsonl, write_parquet
from tests.helpers.rows import make_rows
from tests.helpers.tokenizers import spelled_tokenizer

Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    found = spelled_tokenizer("byte_level")
    found.chat_template = "{{ bos_token }}{% for m in messages %}{{ '[' + m.role + ']' + m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    return found


@pytest.fixture
def prepare(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> Callable[..., tuple[RunData, str]]:
    """read_rows with options; returns the run's rows and what was logged."""
    monkeypatch.setenv("FSDP_QLORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("fsdp_qlora.data.run_data.TemplateWorker", SharedWorker)

    def call(*datasets: object, **given: Any) -> tuple[RunData, str]:
        config = TrainConfig(dataset=tuple(map(str, datasets)), **{"context_length": 2000, **given})
        caplog.clear()
        with caplog.at_level(logging.INFO, "fsdp_qlora"):
            data = read_rows(tokenizer, pick_data(config), vocab_size=len(tokenizer))
        return data, caplog.text

    return call


ALPACA: Rows = make_rows(4)
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "go on"}]
SHARED = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "go on"}]


def test_chats_that_crash_the_template_worker_are_not_cached(prepare, tmp_path, monkeypatch):
    path = write_jsonl(
        tmp_path / "chats.jsonl",
        [{"messages": TALK}, {"messages": [TALK[0], TALK[1] | {"name": "so"}]}],
    )
    exchange = WORKER._exchange
    with monkeypatch.context() as patch:
        patch.setattr(
            WORKER, "_exchange", lambda line, *_: ("", -9) if '"so"' in line else exchange(line)
        )
        data, said = prepare(path, max_bad_rows=0.5)
        assert len(data.train) == 1 and "have ended at it, the last by signal 9" in said
    assert len(prepare(path, max_bad_rows=0.5)[0].train) == 2  # the machine has room again
    assert len(list((tmp_path / "cache" / "tokenized").glob("*.safetensors"))) == 1


def written(content: Callable[[Rows], bytes]) -> Callable[[Path, Rows], Path]:
    """What writes a file of these bytes."""

    def write(path: Path, rows: Rows) -> Path:
        path.write_bytes(content(rows))
        return path

    return write


def with_bom(path: Path, rows: Rows) -> Path:
    path.write_bytes(b"\xef\xbb\xbf" + write_csv(path, rows).read_bytes())
    return path


def excel(path: Path, rows: Rows) -> Path:
    return write_csv(
        path, [{name.capitalize(): value for name, value in row.items()} for row in rows]
    )


def semicolons(path: Path, rows: Rows) -> Path:
    path.write_text(write_csv(path, rows).read_text().replace(",", ";"))
    return path


in_data = written(lambda rows: json.dumps({"version": "1", "data": rows}).encode())
packed = written(
    lambda rows: gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
)
cp1252 = written(lambda _: "instruction,output\na,b\ncafé,c\n".encode("cp1252"))


def split_files(path: Path, rows: Rows) -> Path:
    path.mkdir()
    write_jsonl(path / "train.jsonl", rows)
    write_jsonl(path / "test.jsonl", [{"instruction": "hold", "output": "out"}])
    return path


def split_folders(path: Path, rows: Rows) -> Path:
    for name, part in (("train", rows), ("val", rows[:1])):
        (path / name).mkdir(parents=True)
        packed(path / name / "rows.jsonl.gz", part)
    return path


def unnamed_folders(path: Path, rows: Rows) -> Path:
    (path / "first").mkdir(parents=True)
    write_jsonl(path / "first" / "rows.jsonl", rows)
    return path


def saved(path: Path, rows: Rows) -> Path:
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return path


def saved_splits(path: Path, rows: Rows) -> Path:
    import datasets

    table = datasets.Dataset.from_list(rows)
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(str(path))
    return path


class Case(NamedTuple):
    """A dataset, and what becomes of it. trained: rows that are trained on, 0 if it is refused.
    says: in the log, or in the refusal.
    """

    write: Callable[[Path, Rows], Path]
    name: str
    rows: Rows
    trained: int = 0
    says: str = ""


LONG = [{"instruction": "a" * 3000, "output": "b"}]
TEN_OF_1000_LONG = LONG * 10 + ALPACA[:1] * 990
ELEVEN_OF_1000_LONG = LONG * 11 + ALPACA[:1] * 989
CUT = [{"instruction": "a", "output": "b" * 6000}]
SHAREGPT = [{"conversations": SHARED, "id": "x"}]
PAIRS = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
CASES = {
    "alpaca csv from Excel": Case(with_bom, "a.csv", ALPACA, 4),
    "train and test files": Case(
        split_files, "folder", ALPACA, 4, "train.jsonl is trained on, and not test.jsonl"
    ),
    "sharegpt": Case(write_jsonl, "a.jsonl", SHAREGPT, 1, "does not use: id"),
    "preferences": Case(write_jsonl, "a.jsonl", PAIRS, 0, "chosen and rejected"),
    "capitals": Case(excel, "a.csv", ALPACA, 4),
    "semicolons": Case(semicolons, "a.csv", ALPACA, 4),
    "cp1252": Case(cp1252, "a.csv", [], 0, "a.csv:3: not UTF-8 text"),
    "an object with data": Case(in_data, "a.json", ALPACA, 4),
    "json with lines": Case(write_jsonl, "a.json", ALPACA, 4),
    "save_to_disk": Case(saved, "folder", ALPACA, 4),
    "save_to_disk with splits": Case(
        saved_splits, "folder", ALPACA, 4, "the split train is trained on, and not test"
    ),
    "packed": Case(packed, "a.jsonl.gz", ALPACA, 4),
    "train and val folders": Case(split_folders, "folder", ALPACA, 4, "not val/rows.jsonl.gz"),
    "other folders": Case(
        unnamed_folders, "folder", ALPACA, 0, "Subfolders are not searched (first)"
    ),
    "prompts that are too long": Case(write_jsonl, "a.jsonl", LONG, 0, "--context_length 3142"),
    "1% too long": Case(write_jsonl, "a.jsonl", TEN_OF_1000_LONG, 990, "10 rows have no room"),
    "1.1% too long": Case(
        write_jsonl, "a.jsonl", ELEVEN_OF_1000_LONG, 0, "raise --context_length or --max_bad_rows"
    ),
    "long responses": Case(write_jsonl, "a.jsonl", CUT, 1, "67% of the tokens are cut off"),
}


@pytest.mark.parametrize("name", CASES)
def test_common_dataset_layouts_are_read_or_refused_with_a_reason(name, prepare, tmp_path):
    case = CASES[name]
    path = case.write(tmp_path / case.name, case.rows)
    if case.trained:
        data, log = prepare(path)
        assert len(data.train_rows) == case.trained
        assert case.says in log
    else:
        with pytest.raises(UserError) as error:
            prepare(path)
        assert case.says in str(error.value)


GOOD = {"messages": TALK}


def turn(number: int, **change: Any) -> dict[str, Any]:
    return {"messages": [{**old, **change} if i == number else old for i, old in enumerate(TALK)]}


# In the place of DEEP. No Python reads, checks and renders this many levels; how many they do
# differs.
LEVELS = 5000
NESTED = "[" + '{"properties": ' * LEVELS + "{}" + "}" * LEVELS + "]"
NO_NAME = [{"type": "function", "function": {"arguments": "{}"}}]
BAD_ROWS = {
    "no assistant turn, so nothing to learn": {"messages": TALK[:1]},
    "turn 1: unknown role 'narrator'; known: system, developer": turn(0, role="narrator"),
    "turn 2: its content is null": turn(1, content=None),
    "turn 2: a tool call without a name": turn(1, content=None, tool_calls=NO_NAME),
    "turn 2: its weight is -1, and can be 0 (only read), 1 or another number": turn(1, weight=-1),
    "turn 2: the assistant says nothing": turn(1, content=" "),
    "turn 1: a part of its content is audio_url, and only text": turn(
        0, content=[{"type": "audio_url"}]
    ),
    "turn 1: its content is not text but int": turn(0, content=7),
    "messages is not a list of turns": {"messages": ["hi"]},
    "empty messages": {"messages": []},
    "turn 2 has half a surrogate pair": turn(1, content="\ud800"),
    "tools is not JSON": {**GOOD, "tools": "{"},
    "nested too deeply": {**GOOD, "tools": "DEEP"},
}


@pytest.mark.parametrize("reason", BAD_ROWS)
def test_a_bad_chat_row_is_named_with_its_line_and_reason(reason, prepare, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [GOOD, BAD_ROWS[reason]])
    path.write_text(path.read_text().replace('"DEEP"', NESTED))
    with pytest.raises(UserError) as error:
        prepare(path)
    assert "1 of 2 rows cannot be used" in str(error.value)
    assert f"{path}:2: {reason}" in str(error.value)


BAD_OPTIONS: dict[str, dict[str, Any]] = {
    "columns: 'task' occurs twice": {"columns": ("instruction=task", "output=task")},
    "columns: 'output' occurs twice": {"columns": ("output=a", "output=task")},
    "columns: 'task' does not say which column is which": {"columns": ("task",)},
    "has no column 'tsak'. It has: task, result": {
        "columns": ("instruction=tsak", "output=result")
    },
    "missing columns. It has: task, result. Say which column is which, such as --columns instruction=task": {},
    "prompt_template: alpacca is neither one of alpaca, question_answer": {
        "prompt_template": "alpacca"
    },
}


@pytest.mark.parametrize("message", BAD_OPTIONS)
def test_options_that_do_not_fit_the_data_are_refused(message, prepare, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"task": "a", "result": "b"}])
    with pytest.raises(UserError) as error:
        prepare(path, **BAD_OPTIONS[message])
    assert message in str(error.value)


def test_columns_with_names_of_their_own_give_the_same_rows(prepare, tmp_path):
    texts = [(row["instruction"], row["output"]) for row in ALPACA]
    rows = [{"task": ask, "result": say, "output": "another"} for ask, say in texts]
    plain = [{"instruction": ask, "output": say} for ask, say in texts]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    renamed, log = prepare(path, columns=("instruction=task", "output=result"))
    expected, _ = prepare(write_jsonl(tmp_path / "b.jsonl", plain))
    assert renamed.train.digest == expected.train.digest
    assert "does not use: output" in log


def test_held_out_files_of_a_folder_are_for_evaluation(prepare, tmp_path):
    for write in (split_files, saved_splits):
        folder = write(tmp_path / write.__name__, ALPACA)
        data, _ = prepare(folder, eval_dataset=(f"{folder}[test]",))
        assert (len(data.train_rows), len(data.eval_rows)) == (4, 1)
        with pytest.raises(UserError, match=r"validation.*Its splits: test, train"):
            prepare(f"{folder}[validation]")


# ---- names
# ----------------------------------------------------------------------------------------------


NAMES = {
    "openai/gsm8k": DatasetName("openai/gsm8k"),
    "openai/gsm8k:main[train]": DatasetName("openai/gsm8k", "main", "train"),
    "openai/gsm8k:main[train][:1000]": DatasetName("openai/gsm8k", "main", "train", 0, 1000),
    "openai/gsm8k:main[train[5:]]:0.5": DatasetName("openai/gsm8k", "main", "train", 5, None, 0.5),
    "rows.jsonl[10:20]:3": DatasetName("rows.jsonl", None, None, 10, 20, 3.0),
    "alpaca:0.7": DatasetName("alpaca", weight=0.7),
    "file:///data/rows.jsonl": DatasetName("/data/rows.jsonl"),
}


@pytest.mark.parametrize("text", NAMES)
def test_a_dataset_is_named_with_configuration_split_slice_and_weight(text):
    assert parse_name(text) == NAMES[text]


def test_invalid_dataset_weights_and_slices_are_refused(tmp_path):
    for text, message in (
        ("a.jsonl:0", "the weight of a.jsonl is 0. Give a number above 0"),
        ("a.jsonl:nan", "the weight of a.jsonl is nan"),
        ("a/b[train 1]", r"\[train 1\] in a/b\[train 1\] is neither a split"),
    ):
        with pytest.raises(UserError, match=message):
            parse_name(text)
    path = write_jsonl(tmp_path / "rows[1]:2", ALPACA)
    assert parse_name(str(path)) == DatasetName(str(path))


def test_dataset_slices_select_their_rows(prepare, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ALPACA)
    assert rows_of(f"{path}[1:3]") == rows_of(f"{path}[1:]", 2) == ALPACA[1:3]
    assert [entry.row_number for entry in find_source(f"{path}[1:3]").entries()] == [2, 3]
    assert rows_of(f"{path}[:0]") == []
    assert len({prepare(f"{path}{part}")[0].train.digest for part in ("", "[1:3]", "[1:]")}) == 3


def test_names_of_2024_are_the_rows_of_2024(monkeypatch, prepare):
    import datasets

    tables = {
        ("timdettmers/openassistant-guanaco", "train"): [
            {"text": f"### Human: {i}### Assistant: b"} for i in range(9)
        ],
        ("knowrohit07/know_sql", "validation"): [
            {"question": f"{i}", "context": "c", "answer": "b"} for i in range(1005)
        ],
        ("microsoft/orca-math-word-problems-200k", "train"): [
            {"question": f"{i}", "answer": "b"} for i in range(600)
        ],
        ("openai/gsm8k", "train", "main"): [{"question": "a", "answer": "b"}],
    }

    def load(name: str, *config: str, split: str) -> Any:
        return datasets.Dataset.from_list(tables[(name, split, *config)])

    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: None)
    monkeypatch.setattr("datasets.load_dataset", load)
    assert len(prepare("guanaco")[0].train) == 9
    assert len(prepare("openai/gsm8k:main[train]")[0].train) == 1
    for name, key, part in (
        ("sql", ("knowrohit07/know_sql", "validation"), slice(1000, None)),
        ("orca_math", ("microsoft/orca-math-word-problems-200k", "train"), slice(512)),
    ):
        # As train.py of 2024 did.
        expected = datasets.Dataset.from_list(tables[key]).shuffle(seed=42)["question"][part]
        assert [row["question"] for row in rows_of(name, 512)] == list(expected)


# ---- mixtures
# -------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    first = write_jsonl(tmp_path / "a.jsonl", [{"text": f"a {i}"} for i in range(50)])
    return first, write_parquet(tmp_path / "b.parquet", [{"text": f"b {i}"} for i in range(30)])


def schedule_of(data: RunData, **given: Any) -> Schedule:
    options = {"batch_size": 2, "num_epochs": 4, "max_steps": -1, "seed": 3, **given}
    size = 2 * options["batch_size"] * options["data_size"]
    return Schedule(
        num_rows=data.rows_per_epoch, mixture=data.mixture, global_batch_size=size, **options
    )


def test_several_datasets_without_weights_are_joined(prepare, two):
    first, second = two
    both, _ = prepare(first, second)
    alone = [prepare(path)[0].train for path in (first, second)]
    for found in ("input_ids", "lengths"):
        expected = np.concatenate([getattr(part, found) for part in alone])
        assert getattr(both.train, found)[:].tolist() == expected.tolist()
    assert both.train.row_numbers.tolist() == list(range(1, 81))
    assert both.mixture is None


def test_shares_are_those_of_the_weights_in_every_epoch(prepare, two):
    first, second = two
    data, log = prepare(f"{first}:0.7", f"{second}:0.3")
    assert data.rows_per_epoch == 71  # 50 / 0.7: then the first would repeat a row
    assert "70.0% of the rows, 50 of its 50 in each epoch" in log
    assert "30.0% of the rows, 21 of its 30 in each epoch" in log
    schedule = schedule_of(data, data_size=1)
    epochs: list[list[int]] = [[] for _ in range(4)]
    for step, rows in schedule.rows_of_steps(data.train_rows):
        epochs[step // schedule.steps_per_epoch] += rows.tolist()
    for rows in epochs:
        assert len(set(rows)) == len(rows) == 71
        assert abs(sum(row < 50 for row in rows) - 0.7 * 71) <= 1
    assert set(epochs[0] + epochs[1]) == set(range(80))  # what one epoch leaves the next one takes
    twice, _ = prepare(f"{first}:7", f"{second}:3")
    assert twice.mixture == data.mixture


def test_a_mixture_is_the_same_on_any_number_of_ranks(prepare, two):
    first, second = two
    data, _ = prepare(f"{first}:0.7", f"{second}:0.3", eval_fraction=0.1)
    assert data.mixture is not None

    def steps(data_size: int) -> list[list[int]]:
        schedule = schedule_of(data, data_size=data_size, batch_size=4 // data_size)
        found = []
        for _, rows in schedule.rows_of_steps(data.train_rows):
            rounds = schedule.rounds(rows, data.train.lengths)
            found.append(sorted(int(row) for each in rounds for piece in each for row in piece))
        return found

    assert steps(1) == steps(2) == steps(4)
    assert not {row for step in steps(1) for row in step} & set(data.eval_rows.tolist())
    resumed = schedule_of(data, data_size=1).rows_of_steps(data.train_rows, first=9)
    whole = dict(schedule_of(data, data_size=1).rows_of_steps(data.train_rows))
    assert all(np.array_equal(whole[step], rows) for step, rows in resumed)
    other = dataclasses.replace(schedule_of(data, data_size=1), seed=4)
    others = other.rows_of_steps(data.train_rows)
    assert any(not np.array_equal(whole[step], rows) for step, rows in others)


def test_shares_are_within_one_row_for_any_sizes():
    generator = np.random.default_rng(0)
    for _ in range(300):
        sizes = generator.integers(20, 500, size=3).tolist()
        shares = generator.dirichlet([5, 5, 5])
        counts = mix(shares.tolist(), sizes)
        for count, share, size in zip(counts, shares, sizes, strict=True):
            assert abs(count - share * sum(counts)) < 1 + 1e-9
            assert 0 < count <= size


def test_weights_for_some_datasets_alone_are_refused(prepare, two):
    first, second = two
    said = r"each dataset a weight, or none of them. Without one: .*b.parquet"
    with pytest.raises(UserError, match=said):
        prepare(f"{first}:0.7", second)
    with pytest.raises(UserError, match=r"an epoch has no row of dataset number 2"):
        prepare(f"{first}:0.999", f"{second}:0.001")


ENDS = "{{ m.content }}[/INST]"
# Whether a model is made for chats: what its template writes after an answer, and where its files
# say that it stops.
MADE_FOR_CHATS: dict[str, tuple[str | None, dict[str, object], bool]] = {
    "a base model": (None, {}, False),
    "Qwen3-8B-Base": (ENDS, {"config.json": 1, "generation_config.json": 1}, False),
    "Qwen3-8B": (ENDS, {"generation_config.json": ["[/INST]", 1]}, True),
    "Gemma 3": (ENDS, {"config.json": ["[/INST]"]}, True),
    "Mistral": ("{{ m.content + eos_token }}", {}, True),
    "DeepSeek": ("{{ m.content }}</s>", {}, True),
}


@pytest.mark.parametrize("name", MADE_FOR_CHATS)
def test_instructions_use_the_chat_template_of_chat_models(name, tmp_path):
    template, stops, is_chat = MADE_FOR_CHATS[name]
    asking = spelled_tokenizer("tekken")
    asking.chat_template = template
    end = str(asking.convert_tokens_to_ids("[/INST]"))
    for file, given in stops.items():
        (tmp_path / file).write_text(json.dumps({"eos_token_id": given}).replace('"[/INST]"', end))

    def chosen(**given: Any) -> str | None:
        config = TrainConfig(output_dir=str(tmp_path / "run"), **given)
        keeps_template = earlier_run(config).decisions().fills_template
        model = LearningModel("model", tmp_path, asking)
        options = options_for(pick_data(config), model, keeps_template=keeps_template)
        return options.text.prompt_template

    assert chosen() == ("chat" if is_chat else None)
    assert chosen(prompt_template="alpaca") == "alpaca"
    # A run, a checkpoint and an adapter of before keep their prompts.
    earlier = {"run": "run.json", "step": "state.json", "adapter": "training.json"}
    for folder, file in earlier.items():
        (tmp_path / folder).mkdir()
        record: dict[str, Any] = {"prompt": {"kind": "template"}}
        content = {"about": record} if folder == "step" else record
        (tmp_path / folder / file).write_text(json.dumps(content))
    assert chosen() is chosen(resume=str(tmp_path / "step")) is None
    assert chosen(resume="off", adapter=str(tmp_path / "adapter")) is None
    assert chosen(resume="off") == ("chat" if is_chat else None)
    # The run in the folder was of another model, which this one replaces.
    record |= {"options": {"model_name": "another"}}
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    assert chosen(resume="auto:replace") == ("chat" if is_chat else None)
