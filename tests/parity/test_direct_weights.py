"""Models whose modules read the weights of linear layers, such as hybrids of Mamba and attention
for their kernels.
"""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp_qlora.model.architecture.structure import read_directly
from tests.helpers.models import PROBE, SIZES
from tests.parity.test_hybrids import HYBRIDS

FAMILIES: dict[str, dict[str, Any]] = {
    **{family: hybrid.shape for family, hybrid in HYBRIDS.items()},
    # Coefficients of a class of their own, read in methods other than forward.
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "laurel_rank": 8,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 320,
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "bloom": {},  # reads weights only where its slow_but_exact is set
    "llama": {},
}
READ = {"gemma3n_text", *(family for family, hybrid in HYBRIDS.items() if hybrid.left_out)}


class Watched(nn.Linear):
    """Notes that its weight is read by another module."""

    is_read = is_busy = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.is_busy = True
        y = super().forward(input)
        self.is_busy = False
        return y

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias") and not self.is_busy:
            self.is_read = True
        return super().__getattr__(name)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_whose_weights_others_read_are_detected(family):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    found = read_directly(model)
    linears = {
        path: module
        for path, module in model.base_model.named_modules()
        if type(module) is nn.Linear
    }
    for linear in linears.values():
        linear.__class__ = Watched
    model(input_ids=PROBE, use_cache=False)
    read = [
        f"{model.base_model_prefix}.{path}" for path, linear in linears.items() if linear.is_read
    ]
    assert found == read and bool(found) == (family in READ)
