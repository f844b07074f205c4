import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TIERS = {
    "slow": "also the tests that continuous integration runs",
    "nightly": "also those of the nightly runs",
}

# Before torch is imported: one thread per rank, and a cache of the tests' own.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"


def pytest_addoption(parser: pytest.Parser) -> None:
    for tier, tests in TIERS.items():
        parser.addoption(f"--{tier}", action="store_true", help=tests)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of a tier that neither its option nor `-m` names."""
    left_out = {
        tier
        for tier in TIERS
        if not config.getoption(tier) and tier not in config.getoption("markexpr")
    }
    unwanted = [item for item in items if any(item.get_closest_marker(tier) for tier in left_out)]
    config.hook.pytest_deselected(items=unwanted)
    items[:] = [item for item in items if item not in unwanted]


def pytest_configure(config: pytest.Config) -> None:
    """Tests see no GPU unless those of the marker gpu are asked for.

    They hold for a CPU, and importing bitsandbytes would initialize CUDA in the server process that
    forks the ranks.
    """
    if not re.search(r"(?<!not )\bgpu\b", str(config.getoption("markexpr"))):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    os.environ["FSDP_QLORA_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make (once) a tiny model folder of a family: models("qwen2")."""
    from tests.helpers.models import make_model

    made: dict[str, Path] = {}

    def get(model_type: str = "llama", **overrides: object) -> Path:
        key = f"{model_type}{sorted(overrides.items())}"
        if key not in made:
            made[key] = make_model(tmp_path_factory.mktemp(model_type), model_type, **overrides)
        return made[key]

    return get


@pytest.fixture(autouse=True)
def _no_handler_of_another_test() -> None:
    """A program that ran in this process has left the log's handler, whose stream may be closed by
    now.
    """
    logging.getLogger("fsdp_qlora").handlers.clear()


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What rank 0's logger prints."""
    said: list[str] = []
    handler = logging.Handler()
    log = logging.getLogger("fsdp_qlora")
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield said
    log.removeHandler(handler)
    log.setLevel(level)
