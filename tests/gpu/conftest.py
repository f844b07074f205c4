"""Tests here need an NVIDIA GPU: `pytest -m gpu` runs them, and only them; without one they are
skipped with one line.

FSDP_QLORA_GPU_TESTS=stand-in runs them on the stand-in for CUDA (stand_in/): values are
compared with PHANTOM_VALUES=1 alone.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu import check
from tests.gpu.cases import EXPANDED, MODEL, MOE, make_models
from tests.helpers.rows import make_rows, write_rows

HERE = Path(__file__).parent

_skipped = pytest.StashKey[str]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        item.add_marker("gpu")
    reason = _why_not(config) if ours else None
    if reason:
        config.stash[_skipped] = f"{len(ours)} tests skipped: {reason}"
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_not(config: pytest.Config) -> str | None:
    """None where the tests can run, else the line that says why they are skipped."""
    # Asked before torch is: on a machine with a GPU the other tests must not touch it.
    if not re.search(r"(?<!not )\bgpu\b", str(config.getoption("markexpr"))):
        return "those of the GPU are run by themselves: python -m pytest -m gpu"
    import torch

    return None if torch.cuda.is_available() else "no NVIDIA GPU is visible"


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if line := config.stash.get(_skipped, None):
        terminalreporter.write_line(line)
    if check.left_out:
        terminalreporter.write_line(
            f"{check.left_out} comparisons of values skipped: kernels of the stand-in compute "
            "nothing"
        )


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny models of the cases, by name."""
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def inputs(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, object]]:
    """Options of a run on a tiny model: inputs(model="moe")."""
    dataset = write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", make_rows(16))
    assert {MODEL, MOE, EXPANDED} == set(folders)

    def get(model: str = MODEL) -> dict[str, object]:
        return {
            "model_name": folders[model],
            "dataset": dataset,
            "log_to": "stdout",
            "quant_cache": "off",
        }

    return get
