"""The collectives of a run between two ranks that gloo connects on one card; the last line is what rank 0 received."""

import argparse
import json

import torch
import torch.distributed as dist

from fsdp_qlora.ranks import distributed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="")
    ranks = distributed.read_ranks()
    distributed.start_process_group(ranks, backend=parser.parse_args().backend)
    found = {}

    def values(dtype: torch.dtype) -> torch.Tensor:
        return torch.arange(4, device="cuda").to(dtype) + 10 * ranks.rank

    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.float64):
        whole = torch.empty(8, dtype=dtype, device="cuda")
        dist.all_gather_into_tensor(whole, values(dtype))
        found[f"all_gather {dtype}"] = whole.tolist()
    for dtype in (torch.bfloat16, torch.float32):
        part = torch.empty(2, dtype=dtype, device="cuda")
        dist.reduce_scatter_tensor(part, values(dtype))
        found[f"reduce_scatter {dtype}"] = part.tolist()
    received = torch.empty(3, dtype=torch.bfloat16, device="cuda")
    sizes = [2 - ranks.rank, 1 + ranks.rank]  # rank 0 sends and gets 2 and 1, rank 1 1 and 2
    dist.all_to_all_single(received, values(torch.bfloat16)[:3], sizes, sizes)
    found["all_to_all"] = received.tolist()
    for name, operation in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX)):
        total = values(torch.float32)
        dist.all_reduce(total, operation)
        found[f"all_reduce {name}"] = total.tolist()
    told = values(torch.float32)
    dist.broadcast(told, 0)
    found["broadcast"] = told.tolist()
    distributed.stop_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
