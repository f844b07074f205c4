"""Notes on modules: in no state dict, in no list of modules, and a copy's own."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from fsdp_qlora.model.module_state import set_state, state_of

pytestmark = pytest.mark.quick


def test_notes_on_a_module_have_no_names_in_the_model():
    module = nn.Linear(2, 2)
    before = [*module.state_dict()], [*module.named_modules()], [*module.named_parameters()]
    filler = nn.Linear(2, 2)
    set_state(module, replace(state_of(module), gather_fillers=(filler,)))
    after = [*module.state_dict()], [*module.named_modules()], [*module.named_parameters()]
    assert repr(after) == repr(before)
    module.to(torch.float64)
    assert state_of(module).gather_fillers == (filler,) and filler.weight.dtype == torch.float32


def test_a_copy_of_a_module_has_notes_of_its_own():
    module = nn.Linear(2, 2)
    set_state(module, replace(state_of(module), group_bytes=1))
    copied = copy.copy(module)
    set_state(copied, replace(state_of(copied), group_bytes=2))
    assert (state_of(module).group_bytes, state_of(copied).group_bytes) == (1, 2)
    assert state_of(copy.deepcopy(module)).group_bytes == 1
    assert state_of(nn.Linear(2, 2)).group_bytes is None
