"""The benchmarks' own logic, on shapes too small to measure anything."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from benchmarks import answers, common, cpu, epoch_time, gpu, gpu_report, gpu_steps
from tests.helpers.rows import make_rows, write_rows


def _run(main: Any, *argv: str, output: Path) -> tuple[int, dict[str, Any]]:
    status = main([*argv, "--output", str(output)])
    return status, json.loads(output.read_text())


def test_cpu_benchmark_does_the_same_work_as_everyone_it_is_compared_with(tmp_path):
    # Far too small to be fast, so the exit status does not count.
    _, result = _run(cpu.main, "--tiny", "--rounds", "2", output=tmp_path / "out.json")
    assert {
        part: [name for name in rows if name != "TRL"] for part, rows in result["parts"].items()
    } == {
        "lora linear": ["ours", "PEFT"],
        "dora linear": ["ours", "our LoRA", "PEFT"],
        "head and loss": ["ours", "all logits"],
        "small model": ["ours", "ours, plain", "HF Trainer"],
        "small model, kept": ["ours", "ours, plain", "HF Trainer"],
        "dpo": ["ours"],
        "distill": ["ours", "ours, both"],
    }
    assert not [line for line in cpu.failures(result["parts"]) if "not the same work" in line]
    # 8 of 20 tokens go through the head; all logits are kept, made probabilities, and have a
    # gradient.
    assert result["parts"]["head and loss"]["all logits"]["peak_bytes"] > 2 * 20 * 256 * 4
    assert result["parts"]["head and loss"]["ours"]["peak_bytes"] < 1.5 * 8 * 256 * 4
    low, middle, high = result["parts"]["small model"]["HF Trainer"]["ratio_quartiles"]
    assert 0 < low <= middle <= high


def test_answers_benchmark_asks_both_commits_the_same(tmp_path):
    argv = ["--before", "HEAD", "--rounds", "1", "--questions", "wrong command", "wrong columns"]
    status, result = _run(answers.main, *argv, output=tmp_path / "out.json")
    assert status == 0 and {answer["status"] for answer in result["answers"].values()} == {2}
    for answer in result["answers"].values():
        assert len(answer["before"]) == len(answer["after"]) == 1 and min(answer["before"]) > 0


def test_epoch_benchmark_trains_the_same_rows_however_they_are_laid_out(models, tmp_path):
    argv = [
        "--model_name",
        str(models()),
        "--dataset",
        str(write_rows(tmp_path / "rows.jsonl", make_rows(8))),
    ]
    argv += ["--rows", "8", "--batch_size", "2", "--rounds", "1", "--hidden", "64", "--layers", "1"]
    status, result = _run(epoch_time.main, *argv, output=tmp_path / "out.json")
    assert status == 0 and result["tokens"] > result["targets"] > 8
    ours = {name: who for name, who in result["who"].items() if name.startswith("ours")}
    assert {name: who["steps"] for name, who in ours.items()} == {
        "ours": 4,
        "ours, packed": 2,
        "ours, padded": 4,
    }
    assert all(len(who["cpu_seconds"]) == 1 and len(who["losses"]) == 2 for who in ours.values())
    assert ours["ours, padded"]["losses"] == pytest.approx(ours["ours"]["losses"], rel=1e-5)


def test_gpu_benchmark_measures_speed_beside_peers_that_do_the_same_work(tmp_path):
    argv = ["--tiny", "--precision", "fp32", "--layers", "1", "--parts", "box", "speed"]
    status, result = _run(gpu.main, *argv, output=tmp_path / "out.json")
    assert status == 0, result
    speed = result["parts"]["speed"]
    assert speed["loss_falls"] and len(speed["trace"]["host"]["longest"]) == 40
    assert {"codes", "statistics", "frozen", "trainable"} < set(speed["account_bytes"])
    # The account's estimate of the optimizer's state, against the state itself (and its step
    # counters).
    assert speed["optimizer_state_bytes"] == pytest.approx(
        speed["account_bytes"]["optimizer state"], rel=0.01
    )
    phases = ["before", "planned", "loaded and verified", "4 x 32", "2 x 32", "recompute none"]
    assert list(speed["memory_bytes"]) == phases
    ours = speed["peers"]["ours"]
    peer = speed["peers"]["PEFT + bitsandbytes"]
    assert peer["same_work"] and peer["first_grad_norm"] == pytest.approx(
        ours["first_grad_norm"], rel=1e-4
    )


def test_gpu_benchmark_says_which_kernels_are_missing_and_goes_on(tmp_path):
    argv = ["--tiny", "--precision", "fp32", "--parts", "ways", "attention"]
    status, result = _run(gpu.main, *argv, output=tmp_path / "out.json")
    assert status == 0, result
    ways = result["parts"]["ways"]
    # Triton's kernels run on a GPU alone.
    assert ways["reasons"]["gate, 64 tokens"]["triton"] != "right"
    assert all(row["figures"]["plain"] > 0 for row in ways["rows"])
    attention = result["parts"]["attention"]
    assert attention["missing"]["cuDNN"] == "not on a CPU"
    assert max(attention["errors"]["SDPA, math"].values()) < 3e-6
    assert attention["ms"]["8 x 128"]["SDPA, math"] > 0


@pytest.mark.nightly
def test_gpu_benchmark_compares_ways_and_goes_on_after_one_that_fails(tmp_path):
    argv = ["--tiny", "--precision", "fp32", "--layers", "1", "--parts", "speed"]
    argv += ["--ways", "plain,other,lean"]
    status, result = _run(gpu.main, *argv, output=tmp_path / "out.json")
    assert status == 0, result
    speed = result["parts"]["speed"]
    assert (
        list(speed["ways"]) == ["plain", "lean"] and "takes plain, lean" in speed["failed"]["other"]
    )
    first = [way["batches"]["4 x 32"]["losses"][0] for way in speed["ways"].values()]
    assert first[0] == pytest.approx(first[1], rel=1e-5)
    assert speed["peers"]["PEFT + bitsandbytes"]["same_work"]
    figures = [row["figures"] for row in speed["rows"] if row["item"].startswith("ways, ")]
    assert len(figures) == 6 and all(min(each.values()) > 0 for each in figures)


@pytest.mark.nightly
def test_gpu_benchmark_compares_before_and_after_and_reports_without_names(tmp_path):
    chosen = [
        "offload",
        "host_activations",
        "decode",
        "types",
        "formats",
        "experts",
        "context",
        "padding",
        "batches",
        "whole",
    ]
    chosen += ["alternatives"]
    report = tmp_path / "report.md"
    argv = ["--tiny", "--precision", "fp32", "--report", str(report), "--parts", *chosen]
    status, result = _run(gpu.main, *argv, output=tmp_path / "out.json")
    assert status == 0, result
    rows = {row["item"]: row for part in chosen for row in result["parts"][part].get("rows", [])}
    assert [*rows["padding-free, packing"]["figures"]] == ["padding", "padding-free", "packing"]
    shares = rows["padding-free, packing"]["useful_of_computed"]
    assert shares["padding"] < 0.9 and shares["padding-free"] == shares["packing"] == 1.0
    for number in (1, 16, 64):
        figures = rows[f"{number} answers, 8B, prompts of 32"]["figures"]
        assert [*figures] == ["plain", "decoded once", "graphs", "graphs, decoded once"]
    # A CPU has no graphs: the captured functions are called again, with the same numbers.
    assert set(result["parts"]["decode"]["same_tokens"].values()) == {1.0}
    of_types = rows["train types, 8B, 4 x 32"]["figures"]
    assert len(of_types) == 8 and {"bnb_dora, recompute all", "hqq_lora, recompute none"} < {
        *of_types
    }
    assert [*rows["formats, 8B, 4 x 32"]["figures"]] == ["nf4", "mxfp4", "nvfp4", "fp8"]
    assert len(rows["experts, 2 blocks of 30B-A3B, 4 x 32"]["figures"]) == 4
    assert [*rows["micro-batches, 8B, recompute all"]["figures"]] == ["8 x 32", "16 x 32", "1 x 32"]
    assert len(result["parts"]["alternatives"]["ms"]) == 8
    whole = result["parts"]["whole"]
    assert whole["losses"]["offloaded"] == pytest.approx(whole["losses"]["resident"], rel=1e-4)
    assert [*rows["offload, 70B blocks"]["figures"]] == ["resident", "offloaded", "2 of 2 blocks"]
    of_activations = rows["activations, 70B blocks, 2 x 32"]["figures"]
    assert [*of_activations] == ["recomputed", "host", "half", "kept"]
    assert rows["longest context, 8B"]["figures"]["longest"] == 1536
    assert all(value > 0 for row in rows.values() for value in row["figures"].values())
    text = report.read_text()
    assert str(tmp_path) not in text and "--report" not in text
    for row in rows.values():
        assert f"| {row['item']} | {row['unit']} | " in text and row["aim"] in text


def test_gpu_benchmarks_report_hides_secrets_folders_and_names(monkeypatch):
    monkeypatch.setattr(gpu_report.socket, "gethostname", lambda: "node-17")
    monkeypatch.setattr(gpu_report.getpass, "getuser", lambda: "alice")
    error = (
        "alice on node-17: no /home/alice/models/llama/config.json, hf_abcdefghijklmnopqrstuv, "
        "1/2; "
    )
    error += (
        "11,000 tokens/s; https://pytorch.org/docs/stable in file:///home/alice/x.py:/mnt/alice/y"
    )
    record = {
        "has_values": True,
        "parts": {"box": {"error": error}, "context": {"left_out": "no time left"}},
    }
    text = gpu_report.report(
        record,
        gpu_report.command(["--output", "/home/alice/gpu.json", "--parts", "offload", "speed"]),
    )
    clean = (
        "[user] on [host]: no .../config.json, [secret], 1/2; 11,000 tokens/s; "
        "https://pytorch.org/docs/stable in "
    )
    assert f"| box | {clean}.../x.py:.../y |" in text
    assert ("| context | no time left |") in text and (
        "`python benchmarks/gpu.py --parts offload speed`"
    ) in text


def test_gpu_report_puts_measured_beside_planned_and_peft():
    step = {"tokens_per_second": 9000.0, "planned_tokens_per_second": 6000.0}
    step |= {
        name: {"reserved": gib} for name, gib in (("measured_gib", 9.75), ("planned_gib", 9.5))
    }
    row = {
        "item": "beside peers, 8B, 4 x 2048",
        "unit": "",
        "figures": {"PEFT + bitsandbytes": 6000.0},
    }
    row |= {"ratio": 1.5, "aim": "", "holds": None}
    peer = {"error": "", "peak_bytes": {"peak_reserved": 19.5 * 2**30}}
    tests = gpu_report.count_tests(
        "tests/gpu/test_values.py::test_losses[full, offloaded] PASSED [ 50%]\n"
        "tests/gpu/test_values.py::test_losses[qlora] FAILED [100%]\n"
        "FAILED tests/gpu/test_values.py::test_losses[qlora] - AssertionError: [1.5], on the CPU "
        "[1.6]\n"
    )
    parts = {
        "speed": {"planned": {"all": step}, "rows": [row], "peers": {"PEFT + bitsandbytes": peer}},
        "offload": {"planned": {"resident": step}},
        "values": {
            **tests,
            "error": "exit status 1",
            "part_seconds": 61.0,
            "part_cpu_seconds": 31.0,
        },
    }
    text = gpu_report.report({"has_values": True, "parts": parts}, "python benchmarks/gpu.py")
    assert "| speed | all | 9,000 | 6,000 | 1.50 | 9.75 | 9.5 | 0.50 |" in text
    # another model than the peers'
    assert "| offload | resident | 9,000 | 6,000 |  | 9.75 | 9.5 |  |" in text
    assert "| values | 1 passed, 1 failed |" in text and "| values | 61 | 31 |" in text
    assert "| values | test_losses[qlora] - AssertionError: [1.5], on the CPU [1.6] |" in text


def test_gpu_benchmark_runs_tests_side_by_side_and_ends_slow_parts(monkeypatch, tmp_path):
    # In place of tests: two programs that wait for each other, and one that sleeps.
    meet = (
        "import pathlib, time; pathlib.Path('{0}').touch()\nwhile not "
        "pathlib.Path('{1}').exists(): time.sleep(0.05)"
    )
    said = "\nprint('tests/gpu/test_x.py::test_one PASSED')"
    files = [tmp_path / "one", tmp_path / "two"]
    programs = {
        "values": meet.format(*files) + said + "\n1/0",
        "ranks": meet.format(*reversed(files)) + said,
        "box": "import time; time.sleep(600)",
    }
    monkeypatch.setattr(gpu, "PARTS", {**gpu.PARTS, "box": gpu.Part(1)})
    monkeypatch.setattr(gpu, "command_of", lambda name, *_: [sys.executable, "-c", programs[name]])
    monkeypatch.setattr(gpu, "has_gpu", lambda: True)
    log = tmp_path / "log.txt"
    status, result = _run(
        gpu.main, "--parts", *programs, "--log", str(log), output=tmp_path / "out.json"
    )
    parts = result["parts"]
    assert (
        status == 1
        and parts["values"]["error"] == ("exit status 1")
        and parts["box"]["error"] == ("not done after 3 s")
    )
    assert "error" not in parts["ranks"] and parts["ranks"]["tests"] == parts["values"][
        "tests"
    ] == {"passed": 1}
    assert log.read_text().count("test_one PASSED") == 2 and "ZeroDivisionError" in log.read_text()


def test_gpu_benchmark_says_so_where_there_is_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "has_gpu", lambda: False)
    assert gpu.main([]) == 0
    assert capsys.readouterr().out.count("\n") == 1


def test_random_weights_are_the_same_however_they_are_read(monkeypatch):
    monkeypatch.setattr(common, "_CHUNK", 1000)
    name = "model.layers.0.mlp.up_proj.weight"
    source = common.RandomWeights(
        LlamaConfig(**gpu_steps.SHAPES["tiny"]), torch.float32, torch.device("cpu")
    )
    whole = source.read_rows(name, 0, 512)
    assert whole.shape == source.shape(name) and whole.std().item() == pytest.approx(0.02, rel=0.02)
    assert torch.equal(source.read_rows(name, 3, 77), whole[3:77])
    assert torch.equal(source.read_flat(name, 999, 2001), whole.view(-1)[999:2001])
    assert not torch.equal(whole, source.read_rows(name.replace("up", "gate"), 0, 512))


def test_flops_of_a_7b_step_are_those_counted_by_hand():
    config = LlamaConfig(**gpu_steps.SHAPES["7b"])
    linear = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    total, recomputed = gpu_steps.flops_per_step(
        config, linear_weights=linear, lora_weights=0, num_rows=1, length=1000, num_targets=1000
    )
    # layers, heads, products, a multiply-add per pair and dim
    attention = 32 * 32 * 2 * (1000 * 1000 / 2 * 128 * 2)
    assert recomputed == pytest.approx(2 * linear * 1000 + attention)
    assert total == pytest.approx(3 * recomputed + attention + 4 * 32000 * 4096 * 1000)
