"""Folders that `fsdp-qlora teach` writes: a stranger's is checked, and nothing there is replaced or
lost.
"""

import json
import os
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from fsdp_qlora.__main__ import main
from fsdp_qlora.commands.run_config import parse_train_config
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.config.train_types import QUANT_TYPES, TRAIN_TYPES
from fsdp_qlora.distributed.process_group import start_process_group, stop_process_group
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.supervision.stops import Control
from fsdp_qlora.planning.teacher import teacher_config
from fsdp_qlora.run.prepare import prepare_run
from fsdp_qlora.run.teach import open_teacher
from fsdp_qlora.utils.errors import UserError
from tests.helpers.models import Models, edit_weights
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, on_ranks
from tests.preferences.hostile import PLACES, TENSORS, edit_settings, files_of, replace, rewrite
from tests.preferences.test_distillation import run_options

ALONE = Ranks(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))
K = 7
Options = dict[str, Any]


@pytest.fixture(scope="module")
def options(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Options:
    """Options of `teach` and, with another --teacher, of a student."""
    rows = write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", make_rows(8))
    teacher = models("llama", num_hidden_layers=3)
    run = run_options(
        models("llama"), rows, teacher=teacher, batch_size=4, context_length=512, top_k=K
    )
    return run | {"nproc_per_node": 1, "device": "cpu", "log_to": "stdout", "quant_cache": "off"}


@pytest.fixture(scope="module")
def original(options: Options, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("taught") / "folder"
    assert main(["teach", *flags(**options, output_dir=folder)]) == 0
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "taught"))


@pytest.fixture(scope="module")
def group(original: Path) -> Any:
    start_process_group(ALONE)
    yield
    stop_process_group()


def read(options: Options, folder: Path) -> dict[str, torch.Tensor]:
    """What a student is told of all rows, as a run reads it before it loads anything."""
    config = parse_train_config(flags(**{**options, "teacher": folder}))
    plan = prepare_run(config, ALONE, None).plan
    teacher = open_teacher(config, plan, ALONE, Control())
    assert teacher
    return teacher.targets(plan.data.train, np.arange(len(plan.data.train)))


def refusal(options: Options, folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        read(options, folder)
    message = str(caught.value)
    assert f"--teacher {folder}" in message and "\n" not in message and len(message) < 1000, message
    return message


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("how", TENSORS)
def test_values_that_no_teacher_says_are_refused(how, options, folder):
    [path] = files_of(folder)
    (change, said) = TENSORS[how]
    rewrite(path, change)
    message = refusal(options, folder)
    assert said in message and path.name in message
    assert "of the dataset has" not in message or "row 1 of the dataset" in message


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("how", PLACES)
@pytest.mark.parametrize("name", ["teacher.json", "000000.safetensors"])
def test_what_is_no_file_is_refused_at_once(name, how, options, folder):
    [path] = folder.rglob(name)
    replace(path, how)
    assert name in refusal(options, folder)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"key": None}, "it has no key"),
        ({"key": 7}, "it has no key"),
        ({"key": "[]"}, "its key is not a list of weights"),
        ({"key": "{"}, "cannot be used"),
        ({"key": "[" * 100_000}, "cannot be used"),
        ({"key": json.dumps([None] * 5 + [320])}, "its temperature is None"),
        ({"key": json.dumps([None] * 4 + [1.0, "320"])}, "its vocabulary is '320'"),
        ({"key": json.dumps([None] * 4 + [2.0, 320])}, "temperature 2.0, not 1.0"),
        ({"key": json.dumps([None] * 4 + [1.0, 330])}, "vocabulary 330, not 320"),
        ({"key": json.dumps([None] * 4 + [1.0, 320])}, "lacks 1 of the 1 files of these rows"),
        ({"top_k": None}, "its top_k is None"),
        ({"top_k": 0}, "its top_k is 0"),
        ({"top_k": 321}, "its top_k is 321"),
        ({"top_k": 7.0}, "its top_k is 7.0"),
        ({"top_k": True}, "its top_k is True"),
        ({"top_k": 6}, "lacks 1 of the 1 files of these rows"),
    ],
)
def test_settings_that_no_teacher_writes_are_refused(changed, said, options, folder):
    edit_settings(folder, **changed)
    assert said in refusal(options, folder)
    (folder / "teacher.json").unlink()
    assert "nor the teacher.json" in refusal(options, folder)


@pytest.mark.usefixtures("group")
def test_the_folder_that_teach_has_written_is_read(options, folder):
    told = read(options, folder)
    edit_settings(folder, teacher={"a": 1})  # which is for people
    assert all(torch.equal(value, told[name]) for name, value in read(options, folder).items())
    assert (
        told["teacher_ids"].shape[1] == K
        and (told["teacher_logps"].exp().sum(1) - 1).abs().max() < 0.01
    )


def test_every_rank_refuses_a_strangers_folder_in_one_sentence(options, folder, tmp_path):
    rewrite(files_of(folder)[0], TENSORS["an id twice"][0])
    run = {**options, "teacher": folder, "output_dir": tmp_path / "out", "nproc_per_node": 2}
    statuses, said = on_ranks(2, main, (["train", *flags(**run)],), tmp_path / "logs")
    assert statuses == [2, 2] and "Traceback" not in said
    assert said.count("row 1 of the dataset has an id twice for one token") == 2


# --- teach ---


def teach(
    options: Options, folder: Path, logs: Path | None = None, **changed: Any
) -> tuple[int, str]:
    """The status of `teach` in a process of its own, and what it says."""
    argv = ["teach", *flags(**{**options, "output_dir": folder, **changed})]
    [status], said = on_ranks(1, main, (argv,), logs or folder.with_name("logs"))
    assert "Traceback" not in said
    return status, said


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"temperature": 2.0}, "temperature 1.0, not 2.0"),
        pytest.param({"top_k": 5}, "top_k 7, not 5", marks=pytest.mark.slow),
        pytest.param({"precision": "bf16"}, "precision fp32, not bf16", marks=pytest.mark.slow),
        pytest.param({"teacher": "other"}, "other weights", marks=pytest.mark.slow),
    ],
)
def test_teach_leaves_a_folder_of_other_settings_as_it_is(changed, said, models, options, folder):
    if "teacher" in changed:
        changed = {"teacher": models("llama", num_hidden_layers=1)}
    before = content(folder)
    status, text = teach(options, folder, **changed)
    assert (
        status == 2 and f"--output_dir {folder} has the probabilities" in text and said in text
    ), text[-2000:]
    assert content(folder) == before


def test_teach_adds_other_rows_to_a_folder_and_keeps_those_there(options, folder, tmp_path):
    before = content(folder)
    status, _ = teach(options, folder, dataset=write_rows(tmp_path / "more.jsonl", make_rows(9)))
    assert status == 0 and content(folder).items() > before.items()
    status, text = teach(options, folder)
    assert status == 0 and "probabilities are read from" in text


@pytest.mark.slow
def test_a_teacher_with_fewer_tokens_than_k_names_all_of_them(options, models, tmp_path):
    # rows of the embedding that no token has
    more = {"model_name": models("llama", vocab_size=330), "top_k": 330}
    status, text = teach(options, tmp_path / "taught", **more)
    assert status == 0, text[-2000:]
    with safe_open(files_of(tmp_path / "taught")[0], framework="numpy") as file:
        assert (np.sort(file.get_tensor("ids"), axis=1) == np.arange(320)).all()


@pytest.mark.slow
def test_a_teacher_that_gives_no_numbers_ends_its_pass_in_a_sentence(options, models, tmp_path):
    shutil.copytree(models("llama", num_hidden_layers=3), teacher := tmp_path / "teacher")
    edit_weights(teacher, lambda weights: weights["model.norm.weight"].fill_(3e38))
    status, text = teach(options, tmp_path / "taught", teacher=teacher)
    assert status == 1 and "row 1 of the dataset has a log-probability that is not finite" in text
    assert not files_of(tmp_path / "taught")


def test_teach_does_not_write_beside_settings_that_it_cannot_read(options, folder):
    (folder / "teacher.json").write_text("{")
    before = content(folder)
    status, text = teach(options, folder)
    assert status == 2 and "teacher.json cannot be used" in text and content(folder) == before


def _limited(size: int, argv: list[str]) -> int:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    return main(argv)


@pytest.mark.parametrize("command", ["teach", pytest.param("train", marks=pytest.mark.slow)])
def test_files_that_cannot_be_written_end_a_teachers_pass_in_a_sentence(
    command, options, original, tmp_path, monkeypatch
):
    """A limit of the size of files stands for a full disk; with room again nothing is made twice,
    and nothing differs.

    Two ranks, of which one writes.
    """
    monkeypatch.setenv("FSDP_QLORA_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "out"
    size = files_of(original)[0].stat().st_size
    run = {**options, "output_dir": folder, "nproc_per_node": 2, "batch_size": 2}
    statuses, text = on_ranks(2, _limited, (size - 1, [command, *flags(**run)]), tmp_path / "logs")
    assert statuses == [2, 2] and "Traceback" not in text, text[-3000:]
    assert ("cannot be written to") in text and (
        "to write. Free disk space: the same command continues"
    ) in text
    assert ("FSDP_QLORA_CACHE names another folder" in text) == (command == "train")
    assert not [
        path
        for path in tmp_path.rglob("*")
        if ".partial" in path.name or path.suffix == ".safetensors"
    ]
    if command == "teach":
        statuses, text = on_ranks(2, main, (["teach", *flags(**run)],), tmp_path / "again")
        assert statuses == [0, 0] and content(folder) == content(original)


@pytest.mark.parametrize(
    ("filled", "said"),
    [(8000, "it has 0 B free, and 3.87 KiB are needed"), (0, "No space left on device")],
    ids=["before", "while"],
)
@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/proc/mounts").exists(), reason="mounting needs root"
)
def test_a_full_disk_ends_a_teachers_pass_in_a_sentence(filled, said, options, tmp_path):
    """Before the teacher is loaded, if it is known by then."""
    (disk := tmp_path / "disk").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8192", "tmpfs", str(disk)]).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        (disk / "other").write_bytes(bytes(filled))
        status, text = teach(options, disk / "out", tmp_path / "logs")
        assert status == 2 and said in text and ("Proof: " in text) == (not filled), text[-2000:]
        assert not [*disk.rglob("*.safetensors*"), *disk.rglob("*.partial")]
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.quick
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_a_teacher_is_quantized_as_its_student(quant_type):
    for train_type in TRAIN_TYPES:
        config = TrainConfig(train_type=train_type, quant_type=quant_type, teacher="teacher")
        teacher = teacher_config(config)
        assert teacher.kind.quantizer == config.kind.quantizer
        assert teacher.kind.adapter == "lora"
