"""Graphs that are captured and replayed, with values.

The last line is JSON: for each program of PROGRAMS the largest difference of its replays from the
same work without a graph, relative to the largest number.
"""

import json
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from torch.utils.checkpoint import checkpoint

from stand_in.counts import recording

WIDTH = 64
ROUNDS = 3
Work = Callable[[], Sequence[torch.Tensor]]


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to("cuda")


def graphed(work: Work, pool: object = None) -> tuple[torch.cuda.CUDAGraph, Sequence[torch.Tensor]]:
    """A graph of the work and its outputs, after the work has run on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        outputs = work()
    return graph, outputs


def difference(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    ratios = [
        (one.detach().float() - other.detach().float()).abs().max() / other.detach().abs().max()
        for one, other in zip(found, expected, strict=True)
    ]
    return float(torch.stack(ratios).max())  # NaN if one is


def replayed(work: Work, inputs: Sequence[torch.Tensor]) -> float:
    """The largest difference in replays whose inputs change between them."""
    graph, outputs = graphed(work)
    differences = []
    for _ in range(ROUNDS):
        for each in inputs:
            each.detach().copy_(drawn(*each.shape))
        expected = [each.clone() for each in work()]
        graph.replay()
        differences.append(difference(outputs, expected))
    return float(torch.tensor(differences).max())


def products_and_gradients() -> float:
    x = drawn(8, WIDTH)
    weights = [drawn(WIDTH, WIDTH).requires_grad_() for _ in range(3)]

    def work() -> Sequence[torch.Tensor]:
        y = x
        for weight in weights:
            y = F.silu(y @ weight)
        return [y, *torch.autograd.grad(y.square().sum(), weights)]

    return replayed(work, [x, weights[1]])


def recomputed_quantized_block() -> float:
    """A layer of a 4-bit base with an adapter and attention, recomputed in the pass backward."""
    packed, state = quantize_4bit(drawn(WIDTH, WIDTH).bfloat16())
    x = drawn(2, 8, WIDTH).bfloat16().requires_grad_()
    down = drawn(4, WIDTH).bfloat16().requires_grad_()
    norm = drawn(WIDTH).bfloat16()

    def block(x: torch.Tensor) -> torch.Tensor:
        x = F.rms_norm(x, (WIDTH,), norm)
        y = x @ dequantize_4bit(packed, state) + (x @ down.T) @ down
        heads = y.view(2, 8, 4, -1).transpose(1, 2)
        attended = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return attended.transpose(1, 2).reshape(x.shape) + x

    def work() -> Sequence[torch.Tensor]:
        y = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
        return [y, *torch.autograd.grad(y.float().square().sum(), [x, down])]

    return replayed(work, [x])


def memory_written_in_place() -> float:
    """Nothing is written at the capture, and each replay goes on from the last."""
    total = torch.zeros(WIDTH, device="cuda")
    step = torch.ones((), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total.add_(step)
        total[: WIDTH // 2].mul_(2)
    expected = torch.zeros(WIDTH)
    errors = [difference([total.cpu() + 1], [expected + 1])]
    for number in (1, 3):
        step.fill_(number)
        graph.replay()
        expected.add_(number)
        expected[: WIDTH // 2].mul_(2)
        errors.append(difference([total.cpu()], [expected]))
    return float(torch.tensor(errors).max())


def copies_of_the_host() -> float:
    """From and to pinned memory, at each replay."""
    given = torch.zeros(WIDTH).pin_memory()
    taken = torch.zeros(WIDTH).pin_memory()
    x = torch.empty(WIDTH, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.copy_(given, non_blocking=True)
        taken.copy_(x * 2, non_blocking=True)
    errors = []
    for number in (1.0, 5.0):
        given.fill_(number)
        graph.replay()
        torch.cuda.synchronize()
        errors.append(difference([taken], [given * 2]))
    return float(torch.tensor(errors).max())


def two_graphs_in_one_pool() -> float:
    """The second reads what the first has made."""
    pool = torch.cuda.graph_pool_handle()
    x = drawn(8, WIDTH)
    weight = drawn(WIDTH, WIDTH)
    first, [y] = graphed(lambda: [x @ weight], pool)
    second, [z] = graphed(lambda: [(y @ weight).tanh()], pool)
    x.copy_(drawn(8, WIDTH))
    first.replay()
    second.replay()
    return difference([z], [((x @ weight) @ weight).tanh()])


def streams_that_fork_and_join() -> float:
    x = drawn(WIDTH)
    side = torch.cuda.Stream()

    def work() -> Sequence[torch.Tensor]:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        z = x + 1
        torch.cuda.current_stream().wait_stream(side)
        return [y + z]

    return replayed(work, [x])


def random_numbers() -> float:
    """The draws of two replays and of what follows them."""
    x = drawn(WIDTH)

    def work() -> Sequence[torch.Tensor]:
        return [F.dropout(x, 0.5) + torch.rand(WIDTH, device="cuda"), torch.randn_like(x)]

    graph, outputs = graphed(work)
    torch.cuda.manual_seed(7)
    torch.rand(3, device="cuda")
    expected = [*work(), *work(), *work()]
    torch.cuda.manual_seed(7)
    torch.rand(3, device="cuda")
    found = []
    for _ in range(2):
        graph.replay()
        found += [each.clone() for each in outputs]
    return difference([*found, *work()], expected)


def nothing_is_computed_at_the_capture() -> float:
    """0 if an output is poison until the first replay."""
    x = drawn(WIDTH)
    graph, [y] = graphed(lambda: [x * 2])
    is_poison = bool(y.isnan().all())
    graph.replay()
    return difference([y], [x * 2]) + float(not is_poison)


def launches() -> dict[str, int]:
    """What is counted of a capture and of two replays, and the memory of its pool."""
    x = drawn(8, WIDTH)
    reserved = torch.cuda.memory_reserved()
    with recording() as at_capture:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = (x @ x.T).relu()
    pool = torch.cuda.memory_reserved() - reserved
    with recording() as at_replays:
        graph.replay()
        graph.replay()
    del graph, y
    torch.cuda.empty_cache()
    return {
        "products at the capture": at_capture.matrix_products,
        "allocated at the capture": at_capture.memory["device"] - reserved,
        "pool": pool,
        "at the replays": at_replays.kernels,
        "graphs": at_replays.graphs,
        "captured": at_replays.captured_kernels,
        "waits": at_replays.syncs.total(),
        "released": reserved + pool - torch.cuda.memory_reserved(),
    }


PROGRAMS = [
    products_and_gradients,
    recomputed_quantized_block,
    memory_written_in_place,
    copies_of_the_host,
    two_graphs_in_one_pool,
    streams_that_fork_and_join,
    random_numbers,
    nothing_is_computed_at_the_capture,
]

if __name__ == "__main__":
    torch.manual_seed(0)
    found = {program.__name__: program() for program in PROGRAMS}
    torch.cuda.empty_cache()
    print(json.dumps({"differences": found, "launches": launches()}))
