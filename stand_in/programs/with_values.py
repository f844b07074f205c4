"""Operators and collectives on two ranks with values; the last line says for each whether it is
that of the CPU.
"""

import json
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bitsandbytes.functional import fill, get_paged
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import _disable_current_modes

from stand_in.values.process import strays

GPU = torch.device("cuda")
CPU = torch.device("cpu")


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same numbers on both devices."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def with_gradients(compute: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
    """What is computed and its gradients, in one tensor."""
    leaves = [each.detach().requires_grad_() for each in inputs]
    outcome = compute(*leaves)
    outcome.float().square().sum().backward()
    return torch.cat(
        [each.detach().float().flatten() for each in (outcome, *(leaf.grad for leaf in leaves))]
    )


def attention(
    device: torch.device, backend: SDPBackend, dtype: torch.dtype, **options: Any
) -> torch.Tensor:
    """Of the kernel on the device; the CPU multiplies out, in the same dtype's numbers."""
    q, k, v = (drawn(2, heads, 24, 32, dtype=dtype).to(device) for heads in (4, 2, 2))
    mask = options.pop("mask", None)
    options |= {} if mask is None else {"attn_mask": mask.to(device, dtype)}
    with sdpa_kernel(backend if device == GPU else SDPBackend.MATH):
        q, k, v = (each if device == GPU else each.float() for each in (q, k, v))
        options |= {} if device == GPU or mask is None else {"attn_mask": mask.to(dtype).float()}
        if backend == SDPBackend.EFFICIENT_ATTENTION:  # has no heads that share keys
            k, v = (each.repeat_interleave(2, 1) for each in (k, v))
        return with_gradients(
            lambda *qkv: F.scaled_dot_product_attention(*qkv, enable_gqa=True, **options), q, k, v
        )


def with_dropout(device: torch.device, backend: SDPBackend, dtype: torch.dtype) -> torch.Tensor:
    """1 if the pass backward drops what the forward has dropped: the outcome is linear in the
    values.
    """
    q, k, v = (drawn(1, 2, 24, 32 + i).to(device, dtype)[..., :32].contiguous() for i in range(3))
    v.requires_grad_()
    with sdpa_kernel(backend if device == GPU else SDPBackend.MATH):
        outcome = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    outcome.backward(outcome.detach())
    assert v.grad is not None
    return outcome.float().square().sum() / (v * v.grad).float().sum()


def packed_attention(device: torch.device) -> torch.Tensor:
    """Two sequences of 10 and 14 tokens."""
    q, k, v = (drawn(24, 4, 32, dtype=torch.bfloat16).to(device) for _ in range(3))
    if device == GPU:
        ends = torch.tensor([0, 10, 24], dtype=torch.int32, device=GPU)
        return with_gradients(
            lambda *qkv: varlen_attn(*qkv, ends, ends, 14, 14, window_size=(-1, 0)), q, k, v
        )

    def compute(*qkv: torch.Tensor) -> torch.Tensor:
        parts = zip(*(each.float().transpose(0, 1).split([10, 14], 1) for each in qkv), strict=True)
        return torch.cat(
            [
                F.scaled_dot_product_attention(*part, is_causal=True).transpose(0, 1)
                for part in parts
            ]
        )

    return with_gradients(compute, q, k, v)


def mixed(device: torch.device) -> torch.Tensor:
    """Tensors of both devices that one operator writes."""
    tensors = [drawn(4), drawn(5).to(device)]
    torch._foreach_mul_(tensors, 3.0)
    return torch.cat([each.cpu() for each in tensors])


def dropped(device: torch.device) -> torch.Tensor:
    torch.manual_seed(5)
    return torch.stack(
        [
            F.dropout(drawn(64).to(device)),
            F.dropout(drawn(64).to(device)),
            torch.rand(64, device=device),
        ]
    )


def filled(device: torch.device) -> torch.Tensor:
    """By a function of bitsandbytes' library, as the states of its paged optimizers."""
    if device == CPU:
        return torch.full((64,), 3, dtype=torch.uint8)
    fill(states := get_paged(64, dtype=torch.uint8), 3)
    return states


def in_a_thread(device: torch.device) -> torch.Tensor:
    made: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: made.append(drawn(8).to(device) + 1))
    thread.start()
    thread.join()
    return made[0]


def inferred(device: torch.device) -> torch.Tensor:
    with torch.inference_mode():
        made = F.linear(
            drawn(2, 3, 8).to(device), drawn(4, 8).to(device), drawn(4).to(device)
        ).softmax(-1)
        return made.to(torch.float64).cpu()


BF16 = torch.bfloat16
FLASH = SDPBackend.FLASH_ATTENTION
EFFICIENT = SDPBackend.EFFICIENT_ATTENTION
OPERATORS: dict[str, Callable[[torch.device], torch.Tensor]] = {
    "layer norm": lambda d: with_gradients(
        lambda x, w: F.layer_norm(x, (8,), w), drawn(4, 8).to(d), drawn(8).to(d)
    ),
    "rms norm": lambda d: with_gradients(
        lambda x, w: F.rms_norm(x, (8,), w), drawn(4, 8).to(d), drawn(8).to(d)
    ),
    "softmax to float32": lambda d: drawn(4, 8, dtype=BF16).to(d).softmax(-1, dtype=torch.float32),
    "flash": lambda d: attention(d, FLASH, BF16, is_causal=True),
    "efficient": lambda d: attention(d, EFFICIENT, torch.float32, is_causal=True),
    "efficient, mask": lambda d: attention(d, EFFICIENT, torch.float32, mask=drawn(24, 24)),
    "flash, dropout": lambda d: with_dropout(d, FLASH, BF16),
    "efficient, dropout": lambda d: with_dropout(d, EFFICIENT, torch.float32),
    "packed": packed_attention,
    "nonzero": lambda d: (drawn(64).to(d) > 0).nonzero(),
    "a mask as an index": lambda d: drawn(64).to(d)[drawn(64).to(d) > 0],
    "gradient of what a mask scatters": lambda d: with_gradients(
        lambda x: drawn(64).to(d).masked_scatter(drawn(64).to(d) > 0, x), drawn(64).to(d)
    ),
    "convolution without cuDNN": lambda d: F.conv2d(
        drawn(1, 3, 8, 8).to(d), drawn(4, 3, 2, 2).to(d)
    ),
    "singular values without cuSOLVER": lambda d: torch.linalg.svdvals(drawn(6, 4).to(d)),
    "triangular system without cuBLAS": lambda d: torch.linalg.solve_triangular(
        drawn(6, 6).tril().to(d), drawn(6, 4).to(d), upper=False, unitriangular=True
    ),
    "product of integers without NVRTC": lambda d: torch.arange(1, 9).to(d).prod(),
    "fill of bitsandbytes": filled,
    "tensors of both devices": mixed,
    "dropout and random numbers": dropped,
    "a thread": in_a_thread,
    "inference mode": inferred,
}


def error_of(compute: Callable[[torch.device], torch.Tensor]) -> float:
    found = compute(GPU).cpu().double()
    expected = compute(CPU).double()
    assert found.shape == expected.shape
    return ((found - expected).norm() / expected.norm()).item()


def collectives(rank: int) -> dict[str, bool]:
    """Whether numbers of two ranks arrive as they must, for messages above those that pass without
    values.
    """
    size = 1 << 18
    other = 1 - rank
    mine = torch.arange(2 * size, device=GPU, dtype=torch.float32) * (rank + 1)
    part = mine[:size].clone()
    whole = mine.clone()
    expected = torch.arange(2 * size, dtype=torch.float32)
    dist.reduce_scatter_tensor(part, mine, op=dist.ReduceOp.AVG)
    dist.all_reduce(whole)
    halves = torch.full((4,), 256.0 + rank, device=GPU, dtype=torch.bfloat16)  # 513 is no bfloat16
    dist.all_reduce(halves)
    gathered = torch.empty_like(mine)
    dist.all_gather_into_tensor(gathered, mine[:size])
    exchanged = torch.empty_like(mine)
    dist.all_to_all_single(exchanged, mine)
    sent = torch.empty_like(mine)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, sent, other)]
    ):
        work.wait()
    scaled = mine.clone()
    dist.all_reduce(scaled, op=dist._make_nccl_premul_sum(0.5))
    own = slice(rank * size, (rank + 1) * size)
    return {
        "average": torch.equal(part.cpu(), expected[own] * 1.5),
        "sum": torch.equal(whole.cpu(), expected * 3),
        "sum in bfloat16": halves.tolist() == [512.0] * 4,
        "gather": torch.equal(gathered.cpu(), torch.cat([expected[:size], expected[:size] * 2])),
        "all to all": torch.equal(exchanged.cpu(), torch.cat([expected[own], expected[own] * 2])),
        "message": torch.equal(sent.cpu(), expected * (other + 1)),
        "scaled sum": torch.equal(scaled.cpu(), expected * 1.5),
    }


def bytes_as_bf16(copy: Callable[[torch.Tensor, torch.Tensor], Any]) -> int:
    """How many of all patterns of 16 bits a copy on the device changes."""
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    source = words.to(GPU).view(BF16)
    target = torch.empty_like(source)
    copy(target, source)
    return int((target.cpu().view(torch.int16) != words).sum())


def main() -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    found: dict[str, Any] = {
        "errors": {name: error_of(compute) for name, compute in OPERATORS.items()}
    }
    found["arrived"] = collectives(rank)
    found["changed"] = [
        bytes_as_bf16(torch.Tensor.copy_),
        bytes_as_bf16(lambda to, x: torch._foreach_copy_([to], [x])),
    ]
    found["strays"] = strays()
    with _disable_current_modes():
        torch.ones(4, device=GPU).add_(1)
    found["strays in the end"] = strays()
    print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
