from collections.abc import Iterator

import pytest

from fsdp_qlora.data.chat_template import TemplateWorker

WORKER = TemplateWorker()  # for all tests: a start takes seconds


@pytest.fixture(scope="session", autouse=True)
def _end_worker() -> Iterator[None]:
    yield
    WORKER.close()
