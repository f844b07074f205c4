"""Hidden states of both policy and reference go through a model's code between blocks."""

import pytest
import torch

from fsdp_qlora.sharding.both_states import BothStates


def deepstack(hidden: torch.Tensor, mask: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """As qwen3_vl adds features of images to the states of their tokens."""
    hidden = hidden.clone()
    hidden[mask, :] = hidden[mask, :] + features
    return hidden


def halves(hidden: torch.Tensor, mask: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """By splits, in place, and as the shape says."""
    first, second = hidden.split(hidden.shape[-1] // 2, dim=-1)
    changed = torch.cat([second * 2, first.relu()], dim=-1).to(hidden.dtype)
    return changed.mul_(mask.sum()) + features.sum()


@pytest.mark.quick
@pytest.mark.parametrize("change", [deepstack, halves])
def test_what_is_done_to_the_policy_is_done_to_the_reference(change):
    generator = torch.Generator().manual_seed(0)
    policy, reference = torch.randn(2, 1, 5, 4, generator=generator)
    policy.requires_grad_()
    mask = torch.tensor([[False, True, True, False, False]])
    features = torch.randn(2, 4, generator=generator)
    both = change(BothStates.of(policy, reference), mask, features)
    assert isinstance(both, BothStates) and not both.reference.requires_grad
    assert both.policy.equal(change(policy, mask, features))
    assert both.reference.equal(change(reference, mask, features))
    [found], [expected] = (
        torch.autograd.grad(states.square().sum(), policy)
        for states in (both.policy, change(policy, mask, features))
    )
    assert found.equal(expected)


@pytest.mark.quick
def test_both_are_not_written_into_one_plain_tensor():
    both = BothStates.of(torch.zeros(2), torch.ones(2))
    plain = torch.zeros(2)

    def write() -> None:
        plain[:] = both

    for change in (write, lambda: plain.copy_(both)):
        with pytest.raises(TypeError, match="that both have in common"):
            change()
    added = plain
    # Python then takes the sum for another tensor.
    added += both
    assert isinstance(added, BothStates) and not plain.any()
