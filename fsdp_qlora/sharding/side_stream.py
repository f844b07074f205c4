"""A stream for copies between host and GPU, beside the stream that computes."""

import contextlib
from collections.abc import Iterator

import torch


class SideStream:
    """Copies that overlap with the work of the compute stream. On a CPU they are done at once.

    Memory is allocated on the compute stream, so what is freed must not be in use here any more: the compute stream
    waits for the copy first. The compute stream is the one that is current when this is made: what frees memory may run
    where another one is current, such as a `__del__` in autograd's or FSDP2's code.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if on_gpu else None
        self.compute = torch.cuda.current_stream(device) if on_gpu else None

    @contextlib.contextmanager
    def after_compute(self) -> Iterator[None]:
        """What is issued in this block runs here, after all that the compute stream has been given so far."""
        if self.stream is None or self.compute is None:
            yield
            return
        self.stream.wait_stream(self.compute)
        with torch.cuda.stream(self.stream):
            yield

    def event(self) -> torch.cuda.Event | None:
        """The end of what has been issued here so far."""
        return None if self.stream is None else self.stream.record_event()

    def finish(self) -> None:
        """Let the host wait for all copies."""
        if self.stream is not None:
            self.stream.synchronize()

    def compute_waits(self, event: torch.cuda.Event | None) -> None:
        """Let the compute stream go on after `event` of this stream only. The host does not wait."""
        if event is not None and self.compute is not None:
            self.compute.wait_event(event)
