"""One service on one rank, and one with a teacher on two, each started once for all tests."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.helpers.models import Models

if TYPE_CHECKING:
    from tests.service.harness import Service

try:
    import tinker  # noqa: F401
except ImportError:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str | None:
    """Said where the tests are left out."""
    return (
        "tests/service: left out, tinker is not installed (extra serve)"
        if "collect_ignore_glob" in globals()
        else None
    )


@pytest.fixture(scope="session", params=[1, 2], ids=["one_rank", "two_ranks"])
def service(
    request: pytest.FixtureRequest,
    models: Models,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator["Service"]:
    from tests.service.harness import Service

    teacher = (
        {"teacher": models("llama", num_hidden_layers=4, hidden_size=96)}
        if request.param == 2
        else {}
    )
    running = Service(
        models(), tmp_path_factory.mktemp("service") / "folder", request.param, **teacher
    )
    yield running
    running.end()
