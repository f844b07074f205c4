"""Asks for more than PHANTOM_GIB, after what fits."""

import torch

GIB = 1 << 30

fits = torch.empty(GIB // 2, dtype=torch.uint8, device="cuda")
try:
    torch.empty(GIB, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    print(error)
reserved, free = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
print(f"reserved and free: {(reserved + free) / GIB} GiB")
