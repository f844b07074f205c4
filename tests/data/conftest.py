from collections.abc import Iterator
from typing import Any

import pytest

from fsdp_qlora.data.text.chat_template import TemplateWorker

WORKER = TemplateWorker()  # for all tests: a start takes seconds


class SharedWorker:
    """WORKER, for what would end a worker of its own."""

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        return WORKER.ask(request)

    def close(self) -> None:
        pass


@pytest.fixture(scope="session", autouse=True)
def _end_worker() -> Iterator[None]:
    yield
    WORKER.close()
