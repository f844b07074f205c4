"""A tiny agent for all tests of episodes."""

from pathlib import Path

import pytest

from tests.episodes.runs import make_counting_agent
from tests.rollouts.conftest import alone  # noqa: F401


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_counting_agent(tmp_path_factory.mktemp("agent"))
