"""A known number of kernels, copies, waits and allocations; the last line is what the recorder says
of them.
"""

import json

import torch

from stand_in.counts import recording

MIB = 1 << 20


def main() -> None:
    device = torch.ones(1000, device="cuda")
    left = torch.ones(64, 32, device="cuda")
    right = torch.ones(32, 16, device="cuda")
    # the workspaces of matrix products and of reading back are allocated here
    (left @ right).sum().item()
    pageable = torch.ones(1000)
    pinned = torch.ones(1000).pin_memory()
    torch.cuda.synchronize()
    with recording() as counts:
        device.add_(1)
        device.mul_(2)
        device.zero_()
        left @ right
        device.copy_(pinned, non_blocking=True)
        pinned.copy_(device, non_blocking=True)
        device.copy_(pageable)
        device[:1].item()
        torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    print(json.dumps({**counts.summary(), "found": most_found()}))


def most_found() -> int:
    """The largest of what `nonzero` and `argmin` find where large numbers of the host lay just
    before.
    """
    most = 0
    for size in (1, 2, 4, 64, 100):
        mask = torch.zeros(64, dtype=torch.bool, device="cuda")
        torch.full((size,), 2**40 + 1).cuda()
        most = max(most, len(mask.nonzero()))
        torch.full((size,), 2**40 + 1).cuda()
        most = max(most, int(mask.char().argmin().item()))
    return most


if __name__ == "__main__":
    main()
