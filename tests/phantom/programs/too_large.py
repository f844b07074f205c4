"""Asks for more than PHANTOM_GIB, after what fits."""

import torch

GIB = 1 << 30

fits = torch.empty(GIB // 2, dtype=torch.uint8, device="cuda")
try:
    torch.empty(GIB, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    print(error)
print(f"reserved {torch.cuda.memory_reserved() / GIB} GiB")
print(f"free {torch.cuda.mem_get_info()[0] / GIB} GiB")
