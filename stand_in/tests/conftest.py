"""Tests here run where scripts/phantom.sh has made their environment, and are skipped with one line
elsewhere.
"""

from pathlib import Path

import pytest

from stand_in import environment

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        item.add_marker("phantom")
    reason = environment.why_not()
    if reason and ours:
        config.stash[_skipped] = f"{len(ours)} tests skipped: {reason}"
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=reason))


_skipped = pytest.StashKey[str]()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if line := config.stash.get(_skipped, None):
        terminalreporter.write_line(line)
