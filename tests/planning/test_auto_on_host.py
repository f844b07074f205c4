"""Whether --auto keeps activations in host memory."""

from dataclasses import replace
from typing import Any

import pytest

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.planning import chosen_settings
from fsdp_qlora.planning.chosen_settings import choose_settings
from fsdp_qlora.planning.gpus import GPUS
from fsdp_qlora.planning.offers.planner import make_planner
from fsdp_qlora.planning.search import GpuSet, PlannedRun, Planner

pytestmark = pytest.mark.quick

LLAMA: dict[str, Any] = {"model_name": "llama-2-70b", "context_length": 2048, "batch_size": 4}


def first(planner: Planner, host_ram_gib: float | None) -> PlannedRun:
    """The first of the fastest settings on machines that differ in their host memory."""
    planner.gpus = planner.gpus._replace(host_ram_gib=host_ram_gib)
    return planner.fastest()[0]


def test_auto_keeps_activations_on_the_host_where_link_and_memory_allow():
    planner = make_planner(TrainConfig(**LLAMA), GpuSet(GPUS["RTX 4090"], 2))
    moving = first(planner, 768)
    assert moving.config.recompute == "host" and moving.config.batch_size == 4
    # Half of what is free beside the weights is enough for fewer rows at a time.
    fewer = first(planner, 320)
    assert fewer.config.recompute == "host" and fewer.config.batch_size == 2
    # A host whose memory is not known is not filled.
    for host_ram_gib in (48, None):
        run = first(planner, host_ram_gib)
        assert not run.moves_activations
        assert 1.25 < moving.tokens_per_second / run.tokens_per_second < 1.5
    # A slow link has no time for it.
    slow = Planner(planner.config, GpuSet(GPUS["RTX 3090"], 2), planner.model)
    assert not first(slow, 512).moves_activations
    # Nor has a host that pins nothing.
    planner.may_move_activations = False
    assert not first(planner, 512).moves_activations
    given = Planner(replace(planner.config, recompute="all"), planner.gpus, planner.model)
    assert first(given, 512).config.recompute == "all"


def chosen(monkeypatch: pytest.MonkeyPatch, earlier: Any, num_gpus: int, **options: Any) -> Any:
    """The settings for RTX 4090s that are here."""
    monkeypatch.setattr(chosen_settings, "nearest_gpu", lambda _: GPUS["RTX 4090"])
    monkeypatch.setattr(chosen_settings, "host_memory_free", lambda _: 400 * 2**30)
    config = TrainConfig(**options, auto=True)
    planner = make_planner(config, GpuSet(GPUS["RTX 4090"], num_gpus))
    return choose_settings(config, planner.model, None, None, earlier)


def test_auto_leaves_activations_on_the_host_to_a_trial_where_it_can(monkeypatch, caplog):
    caplog.set_level("INFO", "fsdp_qlora")
    settings = chosen(monkeypatch, {}, 2, **LLAMA)
    assert "recompute" not in settings
    assert "A trial at the start decides" in caplog.text
    # with which the trial's first step, of all blocks recomputing, has room
    planner = make_planner(TrainConfig(**LLAMA), GpuSet(GPUS["RTX 4090"], 2))
    assert planner.planned(**settings, recompute="all").fits_with_margin


def test_auto_asks_for_the_host_where_recomputing_does_not_fit(monkeypatch):
    options = {"model_name": "qwen3-8b", "context_length": 49152, "use_cpu_offload": False}
    settings = chosen(monkeypatch, {}, 1, **options)
    assert settings["recompute"] == "host"
    # A run that is started again keeps it, unless another value is given.
    earlier = vars(TrainConfig(**options)) | settings
    assert chosen(monkeypatch, earlier, 1, **options)["recompute"] == "host"
    assert "recompute" not in chosen(monkeypatch, earlier, 1, **options, recompute="offload")
