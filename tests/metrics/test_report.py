"""The report: it shows what a run has left, whatever that is,
and nothing in it is more than text.
"""

import base64
import dataclasses
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.batches.schedule import Schedule
from fsdp_qlora.data.run_data import RunData
from fsdp_qlora.observability.page.report import make_page, write_at_end, write_report
from fsdp_qlora.observability.page.run_folder import read_run
from fsdp_qlora.planning.gpus import GPUS
from fsdp_qlora.planning.memory import Memory
from fsdp_qlora.planning.offers.planner import make_planner
from fsdp_qlora.planning.search import GpuSet
from fsdp_qlora.run.facts import Measured, data_facts, planned_speed
from fsdp_qlora.utils.errors import UserError
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, run_ranks, train_ok

EVIL = (
    "</script><script>document.title='hacked'</script><img src=x onerror=alert(1)>&amp;\u2028'\"<b>"
)


def make_run(folder: Path, *, steps: int = 12, text: str = "an answer") -> Path:
    folder.mkdir(parents=True)
    records: list[dict[str, object]] = [
        {"step": 0, "epoch": 0.0, "eval_loss": 3.0, "num_target_tokens": 9}
    ]
    for step in range(1, steps + 1):
        loss = 2.0 if step != steps // 2 else 9.0  # a spike
        values = {
            "grad_norm": 1.0,
            "lr": 1e-4,
            "num_tokens": 100,
            "num_target_tokens": 10,
            "step_seconds": 0.5,
        }
        memory = {"memory_gib": {"reserved": [1.0, 2.0 + step / 1000]}}
        records.append(
            {
                "step": step,
                "epoch": step / 10,
                "loss": loss,
                **values,
                "tokens_per_second": 200.0,
                **memory,
            }
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "run.json").write_text(json.dumps({"options": {"lr": 0.1, "model_name": text}}))
    (folder / "status.json").write_text(
        json.dumps({"state": "finished", "total_steps": steps, "reason": text})
    )
    (folder / "facts.json").write_text(
        json.dumps({"environment": {"machine": {text: text}}, "starts": []})
    )
    (folder / "samples.jsonl").write_text(
        json.dumps({"step": 3, "prompt": text, "text": text}) + "\n"
    )
    return folder


class Tags(HTMLParser):
    """The tags of a page, and what its scripts hold."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script" and data.strip():
            self.scripts.append(data)


def test_report_escapes_run_content_and_loads_nothing(tmp_path):
    names = ["one", "two<script>alert(2)<"]
    runs = [read_run(make_run(tmp_path / name, text=EVIL)) for name in names]
    plain = Tags(make_page([read_run(make_run(tmp_path / name)) for name in ("three", "four")]))
    page = make_page(runs)
    found = Tags(page)
    assert [tag for tag, _ in found.tags] == [tag for tag, _ in plain.tags]
    data, script = found.scripts
    content = json.loads(data)
    assert [run["name"] for run in content["runs"]] == names
    assert content["runs"][0]["samples"] == [{"step": 3, "prompt": EVIL, "text": EVIL}]
    assert (
        content["runs"][1]["settings"]["model_name"]
        == EVIL
        == content["runs"][1]["status"]["reason"]
    )
    # The policy of the page lets this one script run, and no address be asked.
    (policy,) = [
        attributes["content"] for tag, attributes in found.tags if attributes.get("http-equiv")
    ]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert (
        policy is not None
        and ("default-src 'none'") in policy
        and (f"script-src 'sha256-{digest}'") in policy
    )
    assert not [
        value for _, attributes in found.tags for name, value in attributes.items() if name == "src"
    ]
    assert "innerHTML" not in script and "http" not in script.replace(
        "http://www.w3.org/2000/svg", ""
    )


def test_the_page_says_which_loss_and_which_memory_it_means(tmp_path):
    page = make_page([read_run(make_run(tmp_path / "one"))])
    assert '"lowest held-out loss"' in page and "lowest trained" not in page
    assert ("What stays allocated in every step") in page and (
        "activations of the longest rows"
    ) in page


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_lowest_held_out_loss_is_one_after_the_first_step(tmp_path):
    script = Tags(make_page([read_run(make_run(tmp_path / "one"))])).scripts[1]
    # The page draws itself when it is loaded, so what counts is taken out of it.
    wanted = (
        r"^const (?:lowest|isNumber|whole|trim) = [^\n]*;$|^function "
        r"(?:short|lowestHeldOut)\(.*?^}$"
    )
    functions = "\n".join(re.findall(wanted, script, re.M | re.S))
    losses = {"evaluations": {"step": [0, 10, 20], "eval_loss": [1.0, 3.0, 2.5]}}
    code = f"{functions}; console.log(lowestHeldOut({json.dumps(losses)}))"
    done = subprocess.run(["node", "-e", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2.5 at step 20"


def test_a_secret_in_the_folders_name_is_hidden(tmp_path):
    token = "hf_" + "s" * 34
    folders = [make_run(tmp_path / token), make_run(tmp_path / "other" / token)]
    for shown in (folders[:1], folders):  # where two have one name, they are called by their paths
        write_report(shown, tmp_path / "report.html")
        assert token not in (tmp_path / "report.html").read_text()


def test_a_long_run_is_thinned_and_keeps_its_peaks_and_totals(tmp_path):
    run = read_run(make_run(tmp_path / "long", steps=20_000))
    assert 300 < len(run["steps"]["step"]) < 1500
    assert run["steps"]["step"][0] == 1 and run["steps"]["step"][-1] == 20_000
    assert max(run["steps"]["loss"]) == 9.0 and run["steps"]["memory/reserved"][-1] == 22.0
    assert run["totals"]["tokens"] == 2_000_000 and run["steps"]["tokens"][-1] == 2_000_000
    assert run["totals"]["tokens_per_second"] == 200.0


def test_damaged_and_missing_files_are_left_out(tmp_path):
    folder = make_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(
            '{"step": 13, "loss": null, "grad_norm": 1e999}\n[1]\n{"loss": 1}\n\0\n{"step": 14, "lo'
        )
    for name in ("run.json", "status.json", "facts.json", "samples.jsonl"):
        (folder / name).write_text('{"a": [')
    run = read_run(folder)
    assert (
        run["steps"]["step"][-1] == 13
        and run["steps"]["loss"][-1] is None
        and run["steps"]["grad_norm"][-1] is None
    )
    assert (run["settings"], run["status"], run["facts"], run["samples"]) == ({}, {}, {}, [])
    assert Tags(make_page([run])).scripts
    with pytest.raises(UserError, match=r"is not the folder of a run: it has no metrics\.jsonl"):
        read_run(tmp_path)


def test_a_report_replaces_a_report_and_nothing_else(tmp_path, lines):
    folder = make_run(tmp_path / "run")
    out = tmp_path / "report.html"
    for _ in range(2):
        write_report([folder], out)
    out.write_text("mine")
    with pytest.raises(UserError, match="is not a report"):
        write_report([folder], out)
    assert out.read_text() == "mine"
    write_at_end(tmp_path / "nowhere", state=None)
    assert len(lines) == 1 and lines[0].startswith("No report was written: ")


def test_report_counts_padding_as_in_the_micro_batches():
    lengths = np.array([5, 3, 8, 2])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    learned = np.ones(18, dtype=bool)
    rows = TokenizedRows(np.zeros(18, np.int32), learned, offsets, np.arange(4))
    schedule = Schedule(4, 2, 4, data_size=1, num_epochs=1, max_steps=-1, seed=0, batching="padded")
    facts = data_facts(RunData(rows, np.arange(4)), schedule)
    # 8 and 5 together, 3 and 2
    assert facts["padding_share"] == pytest.approx(1 - 18 / (2 * 8 + 2 * 3))
    assert facts["tokens"] == 18 and facts["learned"] == 14 and facts["longest"] == 8
    assert facts["lengths"]["counts"] == [0, 0, 1, 1, 0, 1, 0, 1]


def facts_of(page: Path) -> dict:
    return json.loads(Tags(page.read_text()).scripts[0])["runs"][0]


def test_every_way_a_run_ends_leaves_a_report(models, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(24))
    output = tmp_path / "output"
    options = {
        "model_name": models(),
        "dataset": rows,
        "batch_size": 4,
        "eval_fraction": 0.25,
        "eval_steps": 2,
        "context_length": 150,
        "max_bad_rows": 0.5,
        "lr": 1e-3,
        "output_dir": output,
    }
    argv = flags(**options, log_to="stdout", quant_cache="off", max_hours=1e-6)
    statuses, said = run_ranks(1, argv, tmp_path / "logs")
    assert statuses == [3], said[-2000:]
    stopped = facts_of(output / "report.html")
    assert stopped["status"]["state"] == "over_budget" and len(stopped["facts"]["starts"]) == 1

    said = train_ok(1, **options)
    assert "report.html" in said
    run = facts_of(output / "report.html")
    data = run["facts"]["data"]
    assert data["rows"] + data["held_out"] + data["rejected"] == 24 and data["rejected"] > 0
    assert run["status"]["state"] == "finished" and run["steps"]["step"] == list(
        range(1, -(-data["rows"] // 4) + 1)
    )
    assert sum(data["lengths"]["counts"]) == data["rows"] and data["longest"] <= 150
    _, second = run["facts"]["starts"]
    assert second["step"] == (stopped["steps"]["step"][-1] if stopped["steps"] else 0)
    assert {"planning", "loading", "steps", "evaluation", "saving"} <= second["seconds"].keys()
    assert (
        run["facts"]["memory"]["optimizer state"] == 2 * run["facts"]["memory"]["their gradients"]
    )
    assert "torch" in run["facts"]["environment"]["versions"]


def test_report_renders_in_a_browser_without_errors(tmp_path):
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    out = tmp_path / "report.html"
    write_report([make_run(tmp_path / "one", text=EVIL), make_run(tmp_path / "two")], out)
    command = (
        f"{chromium} --headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
        f"--disable-background-networking --user-data-dir={tmp_path / 'profile'} "
        "--enable-logging=stderr --dump-dom"
    )
    done = subprocess.run(
        [*command.split(), f"file://{out}"], capture_output=True, text=True, timeout=100
    )
    assert "CONSOLE" not in done.stderr
    assert (
        len(re.findall("<polyline", done.stdout)) >= 10
        and ("<title>one · two</title>") in done.stdout
    )
    assert len(re.findall("<script", done.stdout)) == 2 and "<img" not in done.stdout


def test_measured_memory_and_speed_are_beside_the_plan(caplog):
    gib = 2**30
    memory = Memory(
        weights={},
        resident={"weights": 8 * gib},
        phases={"backward": {"inputs": gib}},
        allocated=9 * gib,
        host={},
        recomputing=4,
        block=1,
        block_input=1,
        moved=0,
        overhead=gib,
    )
    config = TrainConfig(model_name="qwen3-0.6b", batch_size=2, context_length=512, recompute=4)
    found = make_planner(config, GpuSet(GPUS["RTX 3090"], 2)).planned()
    placed = dataclasses.replace(found.placed, memory=memory)

    def planned(lengths: Sequence[int], batching: str = "padding_free") -> Any:
        schedule = Schedule(
            num_rows=len(lengths),
            batch_size=2,
            global_batch_size=4,
            data_size=2,
            num_epochs=1,
            max_steps=-1,
            seed=0,
            batching=batching,
            context_length=512,
        )
        rows = TokenizedRows(
            *np.zeros((2, sum(lengths)), np.int32), np.cumsum([0, *lengths]), np.array(lengths)
        )
        data = RunData(rows, np.arange(len(lengths)))
        return SimpleNamespace(placed=placed, data=data, schedule=schedule)

    speeds = [
        planned_speed(config, plan, placed, GPUS["RTX 3090"])
        for plan in (
            planned([512] * 8),
            planned([512, *[64] * 7]),
            planned([512, *[64] * 7], "padded"),
        )
    ]
    assert speeds[0] == pytest.approx(found.tokens_per_second) and speeds == sorted(
        speeds, reverse=True
    )
    measured = Measured(config, planned([512] * 8), GPUS["RTX 3090"])

    def stepped(reserved: float, seconds: float) -> dict[str, Any]:
        gathered = {"allocated": [8.0, 9.1], "reserved": [9.0, reserved]}
        record = {"num_tokens": 1000, "step_seconds": seconds, "memory_gib": gathered}
        facts: dict[str, Any] = measured.stepped(record)["measured"]
        return facts

    assert stepped(9.0, seconds=6.0)["tokens_per_second"] == 166.7
    assert stepped(10.4, seconds=4.0) == {
        "planned_gib": {"allocated": 9.0, "reserved": 10.0},
        "measured_gib": {"allocated": 9.1, "reserved": 10.4},
        "recompute": 4,
        "planned_tokens_per_second": round(found.tokens_per_second, 1),
        "tokens_per_second": 200.0,
    }
    assert not caplog.records
    for _ in range(2):
        stepped(10.6, seconds=4.0)
    [record] = caplog.records
    assert ("The plan estimated 10.0 GiB") in record.getMessage() and (
        "reserved 10.6"
    ) in record.getMessage()
