"""Which kernels a run takes: those that are right on every rank, and faster."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.nn.functional as F

from fsdp_qlora.distributed.process_group import start_process_group, stop_process_group
from fsdp_qlora.distributed.ranks import read_ranks
from fsdp_qlora.model.architecture.shapes import BlockShape
from fsdp_qlora.model.kernels import norm
from fsdp_qlora.model.kernels.in_use import GRAPHS, PLAIN, Ways
from fsdp_qlora.model.kernels.trial import Trial, why_wrong
from fsdp_qlora.run import trial_process, ways
from fsdp_qlora.run.decoding_trials import WeightForm
from fsdp_qlora.run.kernel_trials import KernelForm, NormForm, trials
from fsdp_qlora.run.trial_process import NotTried, Request, kept_verdict, run_trials
from fsdp_qlora.run.ways import Measured, TriedKernels, describe, fastest, merged
from tests.helpers import kernel_trials
from tests.helpers.kernel_trials import FORM, broken, in_place, of_ways, plain, wrong
from tests.helpers.run import on_ranks

CPU = torch.device("cpu")
PARTS = ["rotary", "gate", "decoding", "rounding", "norm", "loss", "attention"]
WEIGHT_FORMS = [
    WeightForm("bnb", ("nf4", False)),
    WeightForm("bnb", ("fp4", True), is_rounded=True),
    WeightForm("e2m1", (32, 0, False)),
    WeightForm("e2m1", (16, 2, True)),
    WeightForm("e2m1", (16, 1, False), is_rounded=True),
    WeightForm("fp8", (128, 128, "float8_e4m3fn")),
    WeightForm("fp8", (0, 0, "float8_e5m2")),
    WeightForm("hqq", (4, 64)),
]
VERDICT = {"gate": {"in_place": "", "crashes": "ended its process by signal 11"}}


def test_a_child_process_survives_what_would_take_the_run_with_it():
    source = f"{kernel_trials.__name__}:trials"
    request = Request(FORM.to_dict(), "cpu", [], source)
    assert run_trials(request, way_seconds=3) == {
        "gate": {
            "in_place": "",
            "crashes": "ended its process by signal 11",
            "wrong": "other numbers",
        },
        "norm": {
            "hangs": "took more than 3 s",
            "broken": "no C compiler was found",
        },
    }
    with pytest.raises(NotTried, match="ended by exit status 1"):
        run_trials(request._replace(source="tests.helpers.nothing:trials"))


@pytest.mark.quick
def test_a_verdict_is_made_once_and_again_if_its_file_is_damaged(tmp_path, monkeypatch):
    path = tmp_path / "kernels" / "key.json"
    made = []

    def make() -> dict[str, dict[str, str]]:
        made.append(1)
        return VERDICT

    for _ in range(2):
        assert kept_verdict(path, {"gpu": "H200"}, make) == VERDICT
    assert len(made) == 1
    for content in (path.read_text().replace('""', '"no"'), "[[", ""):
        path.write_text(content)
        assert kept_verdict(path, {}, make) == VERDICT
    assert len(made) == 4
    # What may pass is not kept, and another rank does not try what one could not.
    passing = {"gate": {"triton": "CUDA out of memory"}}
    for _ in range(2):
        assert kept_verdict(path.with_name("full"), {}, lambda: passing) == passing
    assert not path.with_name("full").exists()

    def fail() -> NoReturn:
        made.append(1)
        raise NotTried("ended by exit status 1")

    for _ in range(2):
        with pytest.raises(NotTried, match="exit status 1"):
            kept_verdict(path.with_name("failed"), {}, fail)
    assert len(made) == 5
    monkeypatch.setattr(trial_process, "_FAILED_SECONDS", -1)
    assert kept_verdict(path.with_name("failed"), {}, make) == VERDICT
    assert len(made) == 6
    # A cache that cannot be written: each start tries for itself.
    (tmp_path / "file").touch()
    assert kept_verdict(tmp_path / "file" / "key.json", {}, make) == VERDICT


@pytest.mark.quick
def test_other_bits_are_right_only_as_near_to_float64():
    def norm(x: torch.Tensor, by: float = 1.0) -> list[torch.Tensor]:
        return [F.rms_norm(x.float(), x.shape[-1:]).mul(by).bfloat16()]

    ways = {
        PLAIN: lambda x: [F.rms_norm(x, x.shape[-1:])],
        "as near": norm,
        "far": partial(norm, by=1.02),
        "nan": partial(norm, by=float("nan")),
    }
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    trial = Trial(ways, (x,), exact=lambda x: [F.rms_norm(x.double(), x.shape[-1:])])
    names = [*ways][1:]
    expected = {"as near": "", "far": "other numbers", "nan": "other numbers"}
    assert why_wrong(lambda: trial, names) == expected
    halved = trial._replace(ways={**ways, "as near": lambda x: [norm(x)[0] + 2**-20]})
    without = why_wrong(lambda: halved._replace(exact=None), ["as near"])
    assert without == {"as near": "other numbers"}


@pytest.mark.quick
def test_graphs_must_gain_more_than_filling_up_may_cost():
    assert fastest(Measured({PLAIN: 1.0, GRAPHS: 0.93}, {})) == PLAIN
    assert fastest(Measured({PLAIN: 1.0, GRAPHS: 0.9}, {})) == GRAPHS
    # A run that continues fills up as before.
    assert fastest(Measured({PLAIN: 1.0, GRAPHS: 1.2}, {}), kept=GRAPHS) == GRAPHS
    assert fastest(Measured({PLAIN: 1.0}, {GRAPHS: "other numbers"}), kept=GRAPHS) == PLAIN


@pytest.mark.quick
def test_the_fastest_right_way_is_taken_and_the_others_are_named():
    one = {
        "rotary": Measured({PLAIN: 1.15, "triton": 0.11}, {}),
        "gate": Measured({PLAIN: 1.0, "triton": 0.99}, {}),
        "attention": Measured({PLAIN: 4.1, "cudnn": 2.15}, {"fa4": "not installed"}),
        "norm": Measured({PLAIN: 1.0, "triton": 0.5}, {}),
    }
    other = {
        "rotary": Measured({PLAIN: 1.1, "triton": 0.2}, {}),
        "gate": Measured({PLAIN: 1.0, "triton": 0.5}, {}),
        "attention": Measured({PLAIN: 4.1, "cudnn": 2.15}, {"fa4": "not installed"}),
        "norm": Measured({PLAIN: 1.0}, {"triton": "other numbers"}),
    }
    found = merged([one, other])
    chosen = {part: fastest(each) for part, each in found.items()}
    assert describe(found, chosen) == (
        "Kernels: rotary triton (1.15 -> 0.20 ms), gate plain, attention cudnn (4.10 -> 2.15 ms), "
        "norm plain; not triton (gate): 1.00 -> 0.99 ms; not fa4 (attention): not installed; "
        "not triton (norm): other numbers"
    )
    # FlashAttention 4 is faster than the plain way with lengths of any kind.
    flash = Measured({PLAIN: 4.1, "cudnn": 2.15, "fa4": 2.3}, {})
    assert fastest(flash) == "fa4" and fastest(flash, "cudnn") == "cudnn"
    assert fastest(Measured({PLAIN: 4.1, "cudnn": 2.15, "fa4": 4.2}, {})) == "cudnn"
    # A run that continues takes the way that it had, also if it is the slower one.
    kept = {"rotary": PLAIN, "gate": "triton", "norm": "triton", "attention": "fa4"}
    assert {part: fastest(each, kept[part]) for part, each in found.items()} == {
        "rotary": PLAIN,
        "gate": "triton",
        "norm": PLAIN,
        "attention": "cudnn",
    }


@pytest.mark.quick
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_trials_have_inputs_for_every_part(dtype):
    form = KernelForm(
        [BlockShape(64, 4, 2, 16, 96)],
        dtype,
        rows=2,
        longest=50,
        has_silu=True,
        norms=[NormForm(name, width) for name in norm.FORMS for width in (16, 64)],
        weights=WEIGHT_FORMS,
        vocabulary=99,
        has_varlen=True,
    )
    assert KernelForm.from_dict(json.loads(json.dumps(form.to_dict()))) == form
    parts = trials(form, CPU)
    assert [part.part for part in parts] == PARTS
    # Only these have the plain way's bits.
    exact = trials(replace(form, deterministic=True), CPU)
    assert [part.part for part in exact] == PARTS[:4]
    for part in parts[:-1]:
        for make in (*part.proofs, part.timed):
            trial = make()
            found = trial.results(PLAIN)
            # Results that other ways overwrite are copies, and each trial is the same.
            assert all(map(torch.equal, found, make().results(PLAIN)))
            for each, exact in zip(
                found, trial.exact(*trial.copies()) if trial.exact else (), strict=False
            ):
                assert (each.double() - exact).norm() < 5e-3 * exact.norm()
    assert parts[-1].missing == {"cudnn": "not on a CPU", "fa4": "not on a CPU"}
    [output, *_] = parts[-1].proofs[0]().exact()
    assert output.shape == (256, 4, 16) and output.dtype == torch.float64


def choose_on_a_rank(folder: Path) -> int:
    """Rank 1 fails where rank 0 does not; both must take the same and end."""
    ranks = read_ranks("cpu")

    def triton(x: torch.Tensor) -> list[torch.Tensor]:
        return broken(x) if ranks.rank else plain(x)

    parts = [of_ways("gate", [plain, triton]), of_ways("norm", [plain, in_place])]
    parts += [of_ways("loss", [plain, wrong])]

    def trials(form: object, device: torch.device) -> list[object]:
        if ranks.rank and (folder / "fails").exists():
            raise ImportError("a library is broken")
        return list(parts)

    def milliseconds(trial: object, way: str, device: torch.device) -> float:
        return 2.0 if way == PLAIN else 1.0

    ways.trials = trials
    ways.milliseconds = milliseconds
    verdicts = {part.part: {"in_place": "", "triton": "", "wrong": ""} for part in parts}
    start_process_group(ranks)
    kernels = TriedKernels("auto", CPU, FORM, verdicts)
    before = Ways(linears="lean", gate="triton", norm="in_place")._asdict()
    chosen = kernels.choose(before)
    expected = Ways(linears="lean", norm="in_place")
    (folder / "fails").touch()
    torch.distributed.barrier()
    last = kernels.choose()
    stop_process_group()
    print(f"rank {ranks.rank}: {chosen == expected}, {last == Ways(linears='lean')}")
    return 0


def choose_experts_on_a_rank() -> int:
    """Rank 1 has a GPU without a grouped kernel."""
    ranks = read_ranks("cpu")
    ways.trials = lambda form, device: []
    ways.experts_way = lambda device, dtype: ("plain", "padded")[ranks.rank]
    start_process_group(ranks)
    for chosen in (0, 8):
        shapes = [BlockShape(hidden=64, heads=2, groups=1, head_dim=32, chosen=chosen)]
        kernels = TriedKernels("auto", CPU, replace(FORM, shapes=shapes))
        print(f"{chosen} experts: {kernels.choose().experts}")
    stop_process_group()
    return 0


def test_all_ranks_pad_their_experts_where_one_has_to(tmp_path):
    statuses, output = on_ranks(2, choose_experts_on_a_rank, (), tmp_path / "logs")
    assert statuses == [0, 0], output
    assert output.count("0 experts: plain") == output.count("8 experts: padded") == 2, output


def test_all_ranks_take_the_same_where_one_fails(tmp_path):
    statuses, output = on_ranks(2, choose_on_a_rank, (tmp_path,), tmp_path / "logs")
    assert statuses == [0, 0], output
    assert output.count("True, True") == 2, output
