"""The installed program: its table of commands, its settings by name, what it says of itself."""

import ast
import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fsdp_qlora
from fsdp_qlora import TrainConfig, UserError
from fsdp_qlora.__main__ import COMMANDS, main
from fsdp_qlora.commands.run_config import make_train_config, parse_train_config
from fsdp_qlora.config.text import shipped_configs
from fsdp_qlora.distributed.supervision.launch import set_torch_variables
from fsdp_qlora.distributed.trial import problem_of_two_ranks
from fsdp_qlora.run import machine
from fsdp_qlora.utils.errors import paths_refused
from tests.helpers.run import ROOT

pytestmark = pytest.mark.quick

ASK_ALL = """
import contextlib, io, sys
from fsdp_qlora.__main__ import main
from fsdp_qlora.__main__ import COMMANDS
assert not hasattr(__import__("fsdp_qlora"), "nothing")
for name in COMMANDS:
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        main([name, "--help"])
    assert f"usage: fsdp-qlora {name}" in said.getvalue(), (name, said.getvalue())
slow = {"torch", "transformers", "datasets", "bitsandbytes"}
extras = {"fastapi", "uvicorn", "tinker", "wandb", "hqq", "tensorboard", "PIL", "lm_eval"}
print(sorted((slow | extras) & set(sys.modules)))
"""


def test_help_of_every_command_answers_without_torch_and_extras():
    done = subprocess.run(
        [sys.executable, "-c", ASK_ALL], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_completion_names_commands_and_options(capsys):
    assert main(["completion"]) == 0
    line = capsys.readouterr().out
    done = subprocess.run(
        ["bash", "-c", f"{line}complete -p fsdp-qlora"], capture_output=True, text=True, check=True
    )
    assert {"train", "merge", "--dataset", "--lora_rank"} <= set(re.split(r"[\s'\"]+", done.stdout))


def test_a_wrong_command_is_refused_with_the_nearest_and_the_list(capsys):
    for argv, said in (
        (["trian"], "no command is named 'trian'. Did you mean train?"),
        (["chat"], "no command is named 'chat'. Did you mean generate?"),
        ([], "a command is needed."),
        (["--lr", "1"], "the command comes first: fsdp-qlora train --lr ..."),
    ):
        assert main(argv) == 2
        err = capsys.readouterr().err
        assert said in err and all(f"  {name} " in err for name in COMMANDS)


LONG = "x" * 300  # a name of a file has at most 255 bytes
LONG_PATHS = [f"{'x' * 5000}/{number}.jsonl" for number in range(20)]
# Since 3.14 Path.exists says no where it raised the system's error.
TOO_LONG = (
    ("too long for a file")
    if sys.version_info < (3, 14)
    else ("no such f|is not the folder of a run")
)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["train", "--dataset", f"{LONG}.jsonl"], TOO_LONG),
        (["merge", "--adapter", LONG, "--out", "out"], TOO_LONG),
        (["report", LONG], TOO_LONG),
        (["train", "--config", "{null}"], "--output_dir has a null character"),
        (["export", "{null}", "--out", "out", "--adapter", "a\0b"], "a null character"),
        (["x" * 100_000], "no command is named"),
        (["train", "--" + "x" * 100_000], "Unknown option"),
        (["train", "--dataset", *LONG_PATHS], TOO_LONG),
    ],
)
def test_impossible_file_names_are_refused_in_a_short_message(argv, said, tmp_path, capsys):
    null = tmp_path / "null.yaml"
    null.write_text('output_dir: "a\\0b"\n')
    assert main([word.format(null=null) for word in argv]) == 2
    captured = capsys.readouterr()
    assert re.search(said, captured.err) and len(captured.err) < 7000 and captured.out == ""


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("merge {here} --adapter {there} --out x", "are two adapters. Give one."),
        ("generate {here} --adapter {there} --prompt hi", "are two adapters. Give one."),
        ("evaluate {here} --adapter {there} --dataset a.jsonl", "are two adapters. Give one."),
        ("merge --out x", "Give RUN and --out DIR."),
        ("merge {here}", "Give RUN and --out DIR."),
        ("merge nowhere --output-dir x", "nowhere: there is no such folder."),
        ("merge --output_dir x nowhere", "nowhere: there is no such folder."),
        ("merge nowhere --model_name {here} --output_dir x", "nowhere: there is no such folder."),
        ("generate nowhere --prompt hi", "nowhere: there is no such folder."),
        ("evaluate nowhere --dataset a.jsonl", "nowhere: there is no such folder."),
        ("generate --model_name nowhere/at/all --prompt hi", "model_name nowhere/at/all"),
        ("export nowhere --output_dir x", "nowhere"),
        ("teach --out {here} --model_name nowhere/at/all", "model_name nowhere/at/all"),
        ("merge {here} --outdir x", "Unknown option --outdir; did you mean --output_dir?"),
        ("merge {here} --adaptor x", "Unknown option --adaptor; did you mean --adapter?"),
        ("generate {here} --promt hi", "Unknown option --promt; did you mean --prompt?"),
        ("report {here} --output x", "Unknown option --output; did you mean --out?"),
        ("quantize model --quant_typ x", "Unknown option --quant_typ; did you mean --quant_type?"),
        ("train --out x", "Unknown option --out; did you mean --output_dir?"),
    ],
)
def test_a_command_takes_its_run_by_place_and_names_the_near_option(argv, said, tmp_path, capsys):
    places = {name: tmp_path / name for name in ("here", "there")}
    for place in places.values():
        place.mkdir()
    assert main(argv.format(**places).split()) == 2
    assert said in capsys.readouterr().err


def test_other_errors_are_raised_unchanged():
    denied = PermissionError(errno.EACCES, "denied", "a")
    for error in (denied, ValueError("a bug"), UserError("bad")):
        with pytest.raises(type(error), match=re.escape(str(error))), paths_refused():
            raise error


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": ""}, ""),
        ({"PYTORCH_CUDA_ALLOC_CONF": "x"}, None),
    ],
)
def test_torchs_allocator_is_set_unless_the_user_has_set_it(given, found, monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_CPP_LOG_LEVEL"):
        monkeypatch.setenv(name, "")  # so that what is set here is taken back
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    set_torch_variables()
    assert os.environ.get("PYTORCH_ALLOC_CONF") == found
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "ERROR"


def test_installed_users_are_sent_to_no_file_of_the_clone():
    clone = re.compile(
        r"\b(?:scripts|docs|benchmarks|tests)/|\b(?:train|block_expansion|demo_model)\.py\b"
    )
    for path in (ROOT / "fsdp_qlora").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
        sends = [text for text in texts if isinstance(text, str) and clone.search(text)]
        assert not sends, path


PRINT = [sys.executable, "-m", "fsdp_qlora", "configs", "demo"]


def test_closed_output_pipe_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)  # before the program writes, on a busy machine too
    done = subprocess.run(PRINT, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.stderr, done.returncode) == (b"", 0)


def test_output_that_does_not_fit_on_the_disk_is_an_error():
    with open("/dev/full", "w") as full:
        done = subprocess.run(PRINT, cwd=ROOT, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1 and b"No space left on device" in done.stderr


def test_the_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fsdp-qlora {fsdp_qlora.__version__}\n"


def test_shipped_settings_are_listed_printed_and_used_by_name(capsys):
    assert main(["configs"]) == 0
    listed = capsys.readouterr().out.splitlines()
    stems = [path.stem for path in sorted((ROOT / "configs").glob("*.yaml"))]
    assert [line.split()[0] for line in listed] == stems
    for name, path in shipped_configs().items():
        assert main(["configs", name]) == 0
        assert capsys.readouterr().out == path.read_text()
        by_name = parse_train_config(["--config", name])
        assert by_name == parse_train_config(["--config", str(path)]) != TrainConfig()
    assert main(["configs", "nothing"]) == 2
    with pytest.raises(UserError, match="demo, lora_8b_2x24gb"):
        parse_train_config(["--config", "nothing"])


def test_a_file_wins_over_a_name_and_a_folder_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    by_name = parse_train_config(["--config", "demo"])
    Path("demo").mkdir()  # demo.sh makes one
    assert parse_train_config(["--config", "demo"]) == by_name
    Path("demo").rmdir()
    Path("demo").write_text("lr: 0.5\n")
    assert parse_train_config(["--config", "demo"]).lr == 0.5


def test_env_prints_versions_and_no_secret(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "short")  # too short to be looked for in texts
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:letmein@proxy:3128")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    assert main(["env"]) == 0
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert lines[0] == f"fsdp_qlora: {fsdp_qlora.__version__}"
    assert f"PyTorch version: {torch.__version__}" in lines
    assert {"HF_TOKEN: [secret]", "NCCL_DEBUG: INFO", "HF_HOME: ~/hf"} <= set(lines)
    secrets = ("short", "0123456789abcdef0123", "letmein", str(tmp_path))
    assert not [secret for secret in secrets if secret in said]


def test_doctor_says_a_line_for_each_check_and_fails_if_one_must_be_mended(monkeypatch, capsys):
    def fails(error: Exception) -> str:
        raise error

    checks = {
        "disk": lambda: "much free",
        "hub": lambda: fails(UserError("log in")),
        "GPUs": lambda: fails(OSError(5)),
    }
    monkeypatch.setattr(machine, "CHECKS", checks)
    assert main(["doctor"]) == 1
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["ok", "disk", "much free"],
        ["FIX", "hub", "log in"],
        ["FIX", "GPUs", "OSError: 5"],
    ]
    del checks["hub"], checks["GPUs"]
    assert main(["doctor"]) == 0


def test_doctor_says_where_caches_are_and_how_large(monkeypatch, tmp_path):
    monkeypatch.setenv("FSDP_QLORA_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    assert f"0 B in {tmp_path / 'own'} (empty) and 0 B of compiled" in machine.CHECKS["caches"]()
    files = {"own/tokenized/a": 2**20, "own/images/b/c": 3 * 2**20, "triton/d": 2**21}
    for name, size in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    (tmp_path / "own/images/link").symlink_to(tmp_path / "own/nowhere")
    said = machine.CHECKS["caches"]()
    assert f"4.00 MiB in {tmp_path / 'own'} (images 3.00 MiB, tokenized 1.00 MiB)" in said
    assert f"2.00 MiB of compiled kernels in {tmp_path / 'triton'}:" in said


@pytest.mark.slow
def test_doctor_names_what_goes_wrong_between_two_ranks():
    assert "no-link" in problem_of_two_ranks("cpu", GLOO_SOCKET_IFNAME="no-link")


@pytest.mark.nightly
def test_doctor_finds_two_ranks_right():
    assert problem_of_two_ranks("cpu") == ""


def test_options_from_python_are_those_of_the_command_line():
    values = {
        "model_name": Path("a/model"),
        "dataset": ["a.jsonl", "b.jsonl"],
        "lr": 2e-4,
        "double_quant": False,
        "eval_dataset": None,
        "lora_target_parameters": [],
        "quant_type": "NF4",
        "batch_size": 2,
        "recompute": 8,
    }
    argv = (
        "--model_name a/model --dataset a.jsonl b.jsonl --lr 2e-4 --double_quant false "
        "--quant_type NF4 --batch_size 2 --recompute 8"
    )
    config = make_train_config(None, values)
    assert config == parse_train_config(argv.split())
    assert make_train_config(config, {"batch_size": 3}) == parse_train_config(
        [*argv.split(), "--batch_size", "3"]
    )
    demo = parse_train_config(["--config", "demo", "--max_steps", "2"])
    assert make_train_config("demo", {"max_steps": 2}) == demo
    assert make_train_config(Path("demo"), {"max_steps": 2}) == demo


def test_wrong_options_from_python_are_all_named_at_once():
    wrong = {"batch_sise": 2, "lr": "fast", "load_in_4bit": True, "max_steps": 0}
    with pytest.raises(UserError) as error:
        make_train_config(None, wrong)
    said = str(error.value)
    assert "Unknown option batch_sise; did you mean batch_size?" in said
    assert "lr: expected a number, got 'fast'." in said
    assert "did you mean train_type=qlora?" in said
    assert "--max_steps must be" in said
