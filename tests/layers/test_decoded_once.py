"""Linear layers that keep their decoded weight for many passes, against those that decode it."""

import pytest
import torch
from torch import nn

from fsdp_qlora.model.adapters.merge_aware import MergeAwareLinear
from fsdp_qlora.model.quantizers.decoded_once import decoded_bytes, decoded_once
from tests.layers.shards import weight_of
from tests.layers.test_quantizers import _fill, _layer

CPU = torch.device("cpu")
GPU = torch.device("cuda")
SHAPE = (192, 128)
ITEMSIZE = {torch.float32: 4, torch.bfloat16: 2}

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("dtype", ITEMSIZE)
@pytest.mark.parametrize("kind", ["nf4, absmax in fp32", "hqq4", "fp8", "mxfp4"])
def test_a_weight_is_decoded_once_with_the_same_products(kind, dtype, monkeypatch):
    layer = _layer(kind, SHAPE, dtype, torch.randn(SHAPE[0]).to(dtype))
    _fill(layer, weight_of(SHAPE).to(dtype))
    model = nn.Sequential(layer)
    x = torch.randn(3, 5, SHAPE[1]).to(dtype)
    expected = model(x)
    decode = layer.decode_tensors
    decoded = []
    monkeypatch.setattr(
        layer, "decode_tensors", lambda *args: decoded.append(args) or decode(*args)
    )
    with decoded_once(model, 15, CPU), torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(x), expected)
    assert len(decoded) == 1
    assert layer._decoded is None
    assert torch.equal(model(x), expected)
    assert decoded_bytes(model.modules(), 15, CPU) == SHAPE[0] * SHAPE[1] * ITEMSIZE[dtype]


def test_kernels_that_multiply_codes_keep_them():
    int8 = nn.Sequential(_layer("int8", SHAPE, torch.float32))
    nf4 = nn.Sequential(_layer("nf4", SHAPE, torch.bfloat16))
    assert decoded_bytes(int8.modules(), 64, CPU) == 0
    # bitsandbytes' kernel for few tokens reads the codes on a GPU.
    assert decoded_bytes(nf4.modules(), 1, GPU) == 0
    every = decoded_bytes(nf4.modules(), 1, CPU)
    assert decoded_bytes(nf4.modules(), 64, GPU) == every > 0
    # A weight that would be rounded again for each token is kept instead.
    MergeAwareLinear(nf4[0], rank=2, scaling=1.0, dropout=0.0)
    assert decoded_bytes(nf4.modules(), 1, GPU) == every
