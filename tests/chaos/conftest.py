from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.chaos import harness
from tests.helpers.models import Models


class Reference(NamedTuple):
    """An undisturbed run, and the options it had."""

    options: dict[str, object]
    output_dir: Path

    def same_but(self, output_dir: Path, **changes: object) -> dict[str, object]:
        return {**self.options, "output_dir": output_dir, **changes}


@pytest.fixture(scope="session")
def reference(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("reference")
    options = harness.inputs(models, folder)
    harness.run({**options, "output_dir": folder / "out"}, folder / "logs")
    # steps, and evaluations at 0, 4, 8 and 10
    assert len(harness.numbers(folder / "out")) == 10 + 4
    return Reference(options, folder / "out")


@pytest.fixture
def assert_same(reference: Reference) -> Callable[[Path], None]:
    """Check that a run has come out as the undisturbed one: the adapter to the byte, every number
    once.
    """

    def check(output_dir: Path) -> None:
        assert harness.numbers(output_dir) == harness.numbers(reference.output_dir)
        assert harness.adapter(output_dir) == harness.adapter(reference.output_dir)
        assert harness.status(output_dir)["state"] == "finished"

    return check
