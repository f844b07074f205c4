"""A GPU that is there is used or its trouble is named; the CPU is used where there is none, or when
asked for.
"""

import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fsdp_qlora.distributed.device import choose_device, configure_kernels
from fsdp_qlora.distributed.layout import Layout
from fsdp_qlora.distributed.process_group import (
    _warn_of_small_shared_memory,
    start_process_group,
    stop_process_group,
)
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.utils.errors import UserError


@pytest.fixture(autouse=True)
def no_gpu_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An nvidia-smi that lists two cards."""
    script = tmp_path / "nvidia-smi"
    script.write_text(
        "#!/bin/sh\necho 'NVIDIA GeForce RTX 3090, 535.183.01'\necho 'NVIDIA GeForce RTX 3090, "
        "535.183.01'\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.usefixtures("nvidia_smi")
@pytest.mark.parametrize(
    ("cuda", "says"),
    [
        ("13.0", "built for CUDA 13.0, cannot use them. Install a driver for CUDA 13.0"),
        (None, "is built for the CPU."),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_explained(cuda, says, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(UserError) as raised:
        choose_device("auto", 0)
    message = str(raised.value)
    assert (
        "2 NVIDIA GPUs (NVIDIA GeForce RTX 3090, driver 535.183.01)"
    ) in message and says in message
    for advice in (torch.__version__, "pip install --force-reinstall torch", "--device cpu"):
        assert advice in message
    assert choose_device("cpu", 0).type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose
    assert choose_device("auto", 0).type == "cpu"


def test_without_a_gpu_the_cpu_is_used_unless_cuda_is_requested(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert choose_device("auto", 0).type == "cpu"
    with pytest.raises(UserError, match="--device is cuda, but no GPU is visible"):
        choose_device("cuda", 0)


def test_matrix_products_accumulate_in_fp32():
    matmul = torch.backends.cuda.matmul
    settings = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = {name: getattr(matmul, name) for name in settings}
    try:
        configure_kernels()
        assert [getattr(matmul, name) for name in settings] == [False, False]
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)


@pytest.mark.parametrize(("mib", "is_small"), [(64, True), (1024, False)])
def test_small_shared_memory_is_named_before_nccl_fails(mib, is_small, monkeypatch, caplog):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=mib * 2**20))
    monkeypatch.setattr(logging.getLogger("fsdp_qlora"), "propagate", True)
    _warn_of_small_shared_memory()
    assert ("--shm-size" in caplog.text) == is_small


def test_nccl_settings_of_the_user_stay(monkeypatch):
    monkeypatch.setattr(os, "environ", {**os.environ, "NCCL_MAX_P2P_NCHANNELS": "32"})
    ranks = Ranks(0, 0, 1, 1, torch.device("cuda"))
    layout = Layout(16, 8, "hybrid_full_shard")
    start_process_group(ranks, torch.distributed.HashStore(), layout=layout, backend="fake")
    stop_process_group()
    named = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    assert named == {"NCCL_MAX_P2P_NCHANNELS": "32", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}
