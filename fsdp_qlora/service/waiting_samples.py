"""Groups requests for samples with the same weights and sampling settings."""

from collections.abc import Callable, Iterator

from fsdp_qlora.service.command_reader import CommandReader, WantedSample
from fsdp_qlora.service.reasons import reason_of
from fsdp_qlora.service.records import QueuedRequest
from fsdp_qlora.service.request_queue import RequestQueue
from fsdp_qlora.service.sampling import SampleGroup, SampleRequest
from fsdp_qlora.training.generation.sampling import Completion

# Tokens of waiting prompts that are looked at for those to answer together; what is read is kept.
_MAX_LOOKED_AT = 2**22
# What counts as a token: bytes of images, which take as much memory, and pixels, which take time to
# unpack. Small files may have many, and the other ranks wait meanwhile.
_BYTES_OF_TOKEN = 8
_PIXELS_OF_TOKEN = 64
# For a request that cannot be read: how much of it was read before is unknown.
_UNREADABLE = _MAX_LOOKED_AT // 8


class WaitingSamples:
    """The parsed requests for samples that wait.

    Args:
        alone: names of requests that are not answered together with others.
        fail: is called with a request that cannot be read, and the reason.
    Attributes:
        answers: those of a server to requests that still wait for the ranks, by their names.
    """

    def __init__(
        self,
        reader: CommandReader,
        queue: RequestQueue,
        alone: set[str],
        fail: Callable[[QueuedRequest, str], object],
    ) -> None:
        self.reader = reader
        self.queue = queue
        self.alone = alone
        self._fail = fail
        self.answers: dict[str, list[Completion]] = {}
        self._read: dict[str, WantedSample] = {}

    def read(self, request: QueuedRequest) -> WantedSample:
        """Read each request once: all that wait are looked at for each command."""
        if request.id not in self._read:
            self._read[request.id] = self.reader.read_sample(request)
        return self._read[request.id]

    def take_beside(self, first: QueuedRequest) -> Iterator[QueuedRequest]:
        """Take the requests out of the queue that are answered together with the first one."""
        if first.id in self.alone:
            return
        wanted = self.read(first)
        group = SampleGroup([wanted.request])
        looked_at = 0
        for other in self.queue.samples():
            if other.id in self.alone:
                continue
            beside = self._read_other(other)
            looked_at += _UNREADABLE if beside is None else _size_of(beside.request)
            if looked_at > _MAX_LOOKED_AT:
                return
            if beside is None or not beside.is_alike(wanted):
                continue
            if not group.has_room_for(beside.request):
                continue
            if self.queue.remove_sample(other.id) is None:
                # It has been cancelled.
                continue
            group.requests.append(beside.request)
            yield other

    def forget(self, request: QueuedRequest) -> None:
        """Record that a request has its result."""
        self._read.pop(request.id, None)
        self.answers.pop(request.id, None)
        self.alone.discard(request.id)

    def _read_other(self, request: QueuedRequest) -> WantedSample | None:
        """Read a request that waits; None if it cannot be read.

        It then fails now, and is not read again for each command.
        """
        try:
            return self.read(request)
        except Exception as error:
            if self.queue.remove_sample(request.id) is not None:
                self._fail(request, reason_of(error, "read"))
            return None


def _size_of(request: SampleRequest) -> int:
    """How much a request takes to read and to keep, in tokens."""
    images = request.images
    of_images = max(
        images.num_bytes // _BYTES_OF_TOKEN,
        images.num_pixels // _PIXELS_OF_TOKEN,
    )
    return len(request.prompt) + of_images
