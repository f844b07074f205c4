"""A capture that fails, and what torch can do afterwards: the last line says it as JSON."""

import json

import torch

from fsdp_qlora.sharding.replayed import GraphPool, Replayed

DEVICE = torch.device("cuda", 0)
SHARE = 2**27  # of 2**28 bytes and a little: two do not leave room for three


def memory() -> torch.Tensor:
    return torch.empty(SHARE, dtype=torch.uint8, device=DEVICE)


def frees_cached_memory() -> bool:
    """Whether cached memory is freed for a request of another size."""
    kept = [memory(), memory()]
    del kept
    return torch.empty(3 * SHARE // 2, dtype=torch.uint8, device=DEVICE).is_cuda


def reserved_by(captures: int, pool: GraphPool) -> int:
    """Bytes that captures of the same work reserve."""
    x = torch.ones(2**20, device=DEVICE)
    before = torch.cuda.memory_reserved()
    kept = [Replayed(lambda: (x * 2).sum(), DEVICE, pool) for _ in range(captures)]
    return len(kept) and torch.cuda.memory_reserved() - before


def main() -> None:
    x = torch.ones(4, device=DEVICE)
    pool = GraphPool(DEVICE)
    error = ""
    try:
        Replayed(lambda: x.sum().item(), DEVICE, pool)
    except RuntimeError as raised:
        error = str(raised).splitlines()[0]
    found = {
        "error": error,
        "draws": torch.rand(4, device=DEVICE).is_cuda,
        "captures": reserved_by(1, pool) > 0,
        "frees": frees_cached_memory(),
        "more": reserved_by(3, pool),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
