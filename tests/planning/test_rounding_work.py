"""Merge-aware training is planned with the time that rounding its weights takes."""

import json

import pytest
import torch
from torch import nn

from fsdp_qlora.__main__ import main
from fsdp_qlora.model.adapters.merge_aware import MergeAwareLinear
from fsdp_qlora.model.kernels.in_use import TRITON, Ways
from fsdp_qlora.model.quantizers.table import QUANTIZERS
from fsdp_qlora.planning.gpus import GPUS
from fsdp_qlora.planning.rounding_work import rounding_work

pytestmark = pytest.mark.quick

SHAPE = (4096, 1024)


@pytest.mark.parametrize(("quantizer", "moved"), [("nvfp4", 120), ("fp8", 95)])
def test_a_kernel_leaves_the_operations_in_float64(quantizer: str, moved: int):
    plain = nn.Linear(*reversed(SHAPE), bias=False, device="meta")
    base = QUANTIZERS[quantizer].linear(plain, compute_dtype=torch.bfloat16)
    layer = MergeAwareLinear(base, rank=16, scaling=2.0, dropout=0.0)
    weights = SHAPE[0] * SHAPE[1]
    by_torch = rounding_work(layer, Ways(), 0)
    by_kernel = rounding_work(layer, Ways(rounding=TRITON), 0)
    assert by_torch.moved == moved * weights
    assert by_kernel.moved == 2 * weights
    assert by_torch.operations == by_kernel.operations == 2 * 16 * weights
    assert rounding_work(layer, Ways(), 0, is_decoded=True).moved == 0
    # Of an H100 34 TFLOP/s, of an RTX 4090 1.3.
    assert by_kernel.float64_seconds(GPUS["H100 SXM"]) == pytest.approx(
        by_kernel.operations / 34e12, rel=0.05
    )
    assert by_kernel.float64_seconds(GPUS["RTX 4090"]) == pytest.approx(
        by_kernel.operations / 1.3e12, rel=0.05
    )


def test_a_plan_has_the_time_of_rounding_experts(capsys: pytest.CaptureFixture[str]):
    def rate(*options: str) -> float:
        argv = [
            "plan",
            "--model_name",
            "gpt-oss-20b",
            "--gpu",
            "H100 SXM",
            "--json",
            "--lora_dropout",
            "0",
        ]
        targets = ["--lora_target_modules", "none"]
        targets += ["--lora_target_parameters", "mlp.experts.gate_up_proj,mlp.experts.down_proj"]
        assert main([*argv, *targets, *options]) == 0
        found: float = json.loads(capsys.readouterr().out)["tokens_per_second"]
        return found

    assert rate("--merge_aware", "true") < 0.98 * rate()
