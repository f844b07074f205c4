"""Collectives of known bytes on two ranks; the last line is what the recorder says of them, and
what arrived.
"""

import json
import os

import torch
import torch.distributed as dist

from stand_in.counts import recording

LARGE = 1 << 20
LONG = 60_000


def main() -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    large = torch.zeros(LARGE, dtype=torch.bfloat16, device="cuda")
    whole = torch.zeros(2 * LARGE, dtype=torch.bfloat16, device="cuda")
    mine = torch.tensor([rank + 1, 10 * (rank + 1)], device="cuda")
    everyone = torch.zeros(4, dtype=torch.int64, device="cuda")
    objects: list = [None, None]
    with recording() as counts:
        dist.all_gather_into_tensor(whole, large)
        dist.reduce_scatter_tensor(large, whole)
        dist.all_reduce(large, group=alone)
    mine = torch.tensor([rank + 1, 10 * (rank + 1)], device="cuda")
    dist.all_gather_into_tensor(everyone, mine)
    gathered = everyone.tolist()
    mine = torch.tensor([rank + 1, 10 * (rank + 1)], device="cuda")
    dist.all_reduce(mine)
    summed = mine.tolist()
    mine = torch.tensor([rank + 1], device="cuda")
    dist.broadcast(mine, src=1)
    sent = mine.tolist()
    # as long as what ranks say of a checkpoint
    dist.all_gather_object(objects, f"{' ' * LONG}rank {rank}")
    objects = [text.strip() for text in objects]
    print(
        json.dumps(
            {
                **counts.summary(),
                "gathered": gathered,
                "summed": summed,
                "sent": sent,
                "objects": objects,
            }
        )
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
