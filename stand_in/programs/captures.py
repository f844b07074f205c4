"""What a capture refuses, each in a capture of its own.

The last line is JSON: {name: [what the call returned, what the end of the capture returned]}, and
under "after" whether the process goes on.
"""

import ctypes
import json
import threading
from collections.abc import Callable

import torch

GLOBAL, THREAD_LOCAL, RELAXED = range(3)
NON_BLOCKING = 1
SIZE = 1 << 10
cuda = ctypes.CDLL(None)
pointer = ctypes.c_void_p


def made(create: Callable[..., int], *arguments: int) -> pointer:
    """A stream or an event."""
    handle = pointer()
    assert create(ctypes.byref(handle), *arguments) == 0
    return handle


stream = made(cuda.cudaStreamCreateWithFlags, NON_BLOCKING)
side = made(cuda.cudaStreamCreateWithFlags, NON_BLOCKING)
blocking = made(cuda.cudaStreamCreate)
event = made(cuda.cudaEventCreate)
earlier = made(cuda.cudaEventCreate)
device = pointer(torch.empty(SIZE, dtype=torch.uint8, device="cuda").data_ptr())
pinned = pointer(torch.empty(SIZE, dtype=torch.uint8).pin_memory().data_ptr())
pageable = ctypes.create_string_buffer(SIZE)
graph = pointer()


def fill(where: pointer | None) -> int:
    """Work on a stream."""
    return int(cuda.cudaMemsetAsync(device, 0, ctypes.c_size_t(SIZE), where))


def copy(host: object, where: pointer | None) -> int:
    return int(cuda.cudaMemcpyAsync(device, host, ctypes.c_size_t(SIZE), 4, where))


def allocate() -> int:
    memory = pointer()
    status = cuda.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(SIZE))
    return int(status or cuda.cudaFree(memory))


def pin() -> int:
    memory = pointer()
    status = cuda.cudaHostAlloc(ctypes.byref(memory), ctypes.c_size_t(SIZE), 0)
    return int(status or cuda.cudaFreeHost(memory))


def register() -> int:
    status = cuda.cudaHostRegister(pageable, ctypes.c_size_t(SIZE), 0)
    return int(status or cuda.cudaHostUnregister(pageable))


def relaxed(call: Callable[[], int]) -> int:
    """A call as torch's allocator makes it."""
    mode = ctypes.c_int(RELAXED)
    cuda.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    status = call()
    cuda.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    return status


def elsewhere(call: Callable[[], int]) -> int:
    """A call by another thread."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def record_and(call: Callable[..., int], *arguments: object) -> int:
    """A call about an event of the capture."""
    assert cuda.cudaEventRecord(event, stream) == 0
    return call(event, *arguments)


def destroy_a_graph() -> int:
    """Let go of a graph that was captured earlier."""
    return int(cuda.cudaGraphDestroy(graph))


def fork() -> int:
    """Give work to another stream after that of the capture."""
    cuda.cudaEventRecord(event, stream)
    return int(cuda.cudaStreamWaitEvent(side, event, 0) or fill(side))


def fork_and_join() -> int:
    return int(
        fork() or cuda.cudaEventRecord(event, side) or cuda.cudaStreamWaitEvent(stream, event, 0)
    )


def wait_from_another_capture() -> int:
    """Two captures may not become one."""
    cuda.cudaStreamBeginCapture(side, THREAD_LOCAL)
    cuda.cudaEventRecord(event, side)
    status = cuda.cudaStreamWaitEvent(stream, event, 0)
    cuda.cudaStreamEndCapture(side, ctypes.byref(pointer()))
    return int(status)


def end(where: pointer) -> int:
    return int(cuda.cudaStreamEndCapture(where, ctypes.byref(pointer())))


def ended_on_a_fork() -> int:
    fork()
    return end(side)


def captured(
    call: Callable[[], int], mode: int = THREAD_LOCAL, where: pointer = stream
) -> list[int]:
    """What a call in a capture returns, and then the capture's end."""
    cuda.cudaEventRecord(earlier, side)
    assert cuda.cudaStreamBeginCapture(where, mode) == 0
    assert fill(where) == 0
    status = call()
    return [status, end(where)]


CASES: dict[str, Callable[[], list[int]]] = {
    "work": lambda: captured(lambda: fill(stream)),
    "pinned copy": lambda: captured(lambda: copy(pinned, stream)),
    "work of the default stream": lambda: captured(lambda: fill(None)),
    "work of another stream": lambda: captured(lambda: fill(side)),
    "fork and join": lambda: captured(fork_and_join),
    "relaxed allocation": lambda: captured(lambda: relaxed(allocate)),
    "allocation of a relaxed capture": lambda: captured(allocate, RELAXED),
    "allocation by another thread": lambda: captured(lambda: elsewhere(allocate)),
    "allocation by another thread, global": lambda: captured(lambda: elsewhere(allocate), GLOBAL),
    "allocation": lambda: captured(allocate),
    "pinned allocation": lambda: captured(pin),
    "registration": lambda: captured(register),
    "destruction of a graph": lambda: captured(destroy_a_graph),
    "wait for the stream": lambda: captured(lambda: cuda.cudaStreamSynchronize(stream)),
    "query of the stream": lambda: captured(lambda: cuda.cudaStreamQuery(stream)),
    "wait for the stream, relaxed": lambda: captured(
        lambda: cuda.cudaStreamSynchronize(stream), RELAXED
    ),
    "wait for the device": lambda: captured(cuda.cudaDeviceSynchronize),
    "wait for the device by another thread": lambda: captured(
        lambda: elsewhere(cuda.cudaDeviceSynchronize)
    ),
    "wait for an earlier event": lambda: captured(lambda: cuda.cudaEventSynchronize(earlier)),
    "wait for a captured event": lambda: captured(lambda: record_and(cuda.cudaEventSynchronize)),
    "query of a captured event": lambda: captured(lambda: record_and(cuda.cudaEventQuery), RELAXED),
    "blocking copy": lambda: captured(
        lambda: cuda.cudaMemcpy(device, pinned, ctypes.c_size_t(SIZE), 4)
    ),
    "pageable copy": lambda: captured(lambda: copy(pageable, stream)),
    "dependency on an earlier event": lambda: captured(
        lambda: cuda.cudaStreamWaitEvent(stream, earlier, 0)
    ),
    "dependency on another capture": lambda: captured(wait_from_another_capture),
    "dependency of the default stream": lambda: captured(
        lambda: record_and(lambda each: cuda.cudaStreamWaitEvent(None, each, 0))
    ),
    "default stream beside a blocking one": lambda: captured(
        lambda: fill(None), THREAD_LOCAL, blocking
    ),
    "fork": lambda: captured(fork),
    "end on a fork": lambda: captured(ended_on_a_fork),
    "end by another thread": lambda: captured(lambda: elsewhere(lambda: end(stream))),
    "capture of a captured stream": lambda: captured(
        lambda: cuda.cudaStreamBeginCapture(stream, THREAD_LOCAL)
    ),
    "work after a refusal": lambda: captured(lambda: cuda.cudaStreamQuery(stream) and fill(stream)),
    "end without a capture": lambda: [0, end(stream)],
    "capture of the default stream": lambda: [cuda.cudaStreamBeginCapture(None, 0), 0],
    "query of an event of an ended capture": lambda: [
        captured(lambda: cuda.cudaEventRecord(event, stream))[1],
        cuda.cudaEventQuery(event),
    ],
}


def failed_in_torch() -> list[str]:
    """torch's own graph, in which the host reads a result: its error, and that of its end."""
    texts = []
    x = torch.ones(4, device="cuda")
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            try:
                x.sum().item()
            except RuntimeError as error:
                texts.append(str(error).splitlines()[0])
                raise
    except RuntimeError as error:
        texts.append(str(error).splitlines()[0])
    return texts


def goes_on() -> bool:
    """Whether work, waits and another capture succeed."""
    torch.cuda.synchronize()
    x = torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
    graph.replay()
    torch.cuda.empty_cache()
    return bool(torch.cuda.memory_allocated() > 0)


if __name__ == "__main__":
    assert cuda.cudaStreamBeginCapture(stream, THREAD_LOCAL) == 0
    assert cuda.cudaStreamEndCapture(stream, ctypes.byref(graph)) == 0
    found: dict[str, object] = {}
    for name, case in CASES.items():
        found[name] = case()
        cuda.cudaGetLastError()
    print(json.dumps(found | {"torch": failed_in_torch(), "after": goes_on()}))
