"""Answers of a server to requests for samples."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from fsdp_qlora.distributed.ranks import derive_seed
from fsdp_qlora.service.adapter_checks import AdapterChecks
from fsdp_qlora.service.commands import Sample
from fsdp_qlora.service.sampling import Drawing
from fsdp_qlora.service.served_adapters import LoadedAdapter, ServedAdapters
from fsdp_qlora.training.generation.sampling import Completion
from fsdp_qlora.training.rl.client import Server
from fsdp_qlora.training.rl.server_answers import ServerAnswers
from fsdp_qlora.training.rl.server_requests import SentPrompt


class SampleServer:
    """Asks a server for samples, from saved weights and from the base.

    Args:
        checks: whether the server uses the adapters.
        answers_of: gives what asks for answers with some sampling settings.
    """

    def __init__(
        self,
        server: Server,
        adapters: ServedAdapters,
        checks: AdapterChecks,
        answers_of: Callable[[Drawing], ServerAnswers],
    ) -> None:
        self.checks = checks
        self._server = server
        self._adapters = adapters
        self._answers_of = answers_of

    def answer(self, command: Sample, sample: int) -> Completion:
        """One sample of a command's only request. Any thread may call it.

        It waits for a server that is away, and has an adapter loaded again that the server has
        lost.

        Raises:
            RolloutError: the server refuses it, or has not answered for too long.
        """
        [request] = command.requests
        # As the service's own samples: it depends on the request's seed and its number alone.
        seed = derive_seed("sample", request.seed, sample)
        answers = self._answers_of(command.drawing)
        with self._using(command) as adapter:
            if adapter is None:
                name = self._server.patiently(self._server.names)[0]
                load = None
            else:
                name = adapter.name
                load = adapter.load
            asked = answers.request(name, SentPrompt(request.prompt), seed)
            return self._server.patiently(partial(answers.ask, asked, load))

    @contextlib.contextmanager
    def _using(self, command: Sample) -> Iterator[LoadedAdapter | None]:
        """The adapter of a command, loaded; None for the base."""
        if command.path is None:
            yield None
            return
        with self._adapters.using(Path(command.path), str(command.saved_by)) as adapter:
            yield adapter
