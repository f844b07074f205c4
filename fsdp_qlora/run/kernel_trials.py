"""Trials of each part's kernels with the sizes of a model's blocks, on random numbers."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fsdp_qlora.model.architecture.shapes import BlockShape, block_shapes
from fsdp_qlora.model.kernels import gate
from fsdp_qlora.model.kernels.in_use import TRITON
from fsdp_qlora.model.kernels.rounding import triton
from fsdp_qlora.model.kernels.trial import PartTrials, Trial

if TYPE_CHECKING:  # the process of trials needs neither, and starts sooner
    from fsdp_qlora.config.options import TrainConfig
    from fsdp_qlora.planning.plan import ModelPlan

# Tokens of a proof, and at most of what is timed: a kernel's time grows with them.
_FEW = 37
_MANY = 2048
_MOST = 16_384
_SILU = ("silu", "swish")


@dataclass(frozen=True)
class KernelForm:
    """The sizes of a model that its kernels depend on. They go to another process as JSON."""

    shapes: list[BlockShape]
    """The sizes of its blocks, each once."""
    dtype: str
    """The dtype that blocks compute in, such as bfloat16."""
    tokens: int
    """The tokens of the run's longest micro-batch, as far as it is tried."""
    has_silu: bool
    """Whether its MLPs have a gate with SiLU."""

    @classmethod
    def of(cls, config: "TrainConfig", plan: "ModelPlan") -> "KernelForm":
        """The form of a planned model."""
        text = plan.config.get_text_config()
        activation = getattr(text, "hidden_act", None) or getattr(text, "hidden_activation", None)
        return cls(
            shapes=[*dict.fromkeys(block_shapes(plan.config))],
            dtype=str(plan.precision.compute_dtype).removeprefix("torch."),
            tokens=min(_MOST, config.batch_size * config.longest_row),
            has_silu=activation in _SILU,
        )

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "KernelForm":
        """A form that came as JSON."""
        return cls(**{**fields, "shapes": [BlockShape(*shape) for shape in fields["shapes"]]})

    def to_dict(self) -> dict[str, Any]:
        """The form as JSON has it."""
        fields = dataclasses.asdict(self)
        return fields | {"shapes": [list(shape) for shape in self.shapes]}

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch has it."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


def trials(form: KernelForm, device: torch.device) -> list[PartTrials]:
    """The parts of such a model that have other ways on this device."""
    return [*_trials(form, device)]


def _trials(form: KernelForm, device: torch.device) -> Iterator[PartTrials]:
    inner = max((shape.inner for shape in form.shapes), default=0)
    if form.has_silu and inner:
        yield _by_tokens("gate", form, partial(_gate, form.torch_dtype, device, inner))


def _by_tokens(part: str, form: KernelForm, make: Callable[[int], Trial]) -> PartTrials:
    """The trials of a part whose work is a number of tokens."""
    ways = [TRITON] if triton else []
    return PartTrials(
        part,
        ways=ways,
        proofs=[partial(make, _FEW), partial(make, min(_MANY, form.tokens))],
        timed=partial(make, form.tokens),
        apart=ways,
        missing={} if ways else {TRITON: "not installed"},
    )


def _random(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Random numbers of these shapes, the same at each call."""
    generator = torch.Generator(device).manual_seed(0)
    empty = (torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
    return tuple(each.normal_(generator=generator) for each in empty)


def _gate(dtype: torch.dtype, device: torch.device, inner: int, tokens: int) -> Trial:
    def compute(way: gate.GateWay, *tensors: torch.Tensor) -> list[torch.Tensor]:
        grad, activated, up = tensors
        product = way.product(activated, up)
        way.gradients_(grad, activated, up, False)
        return [product, grad, activated, up]

    ways = {name: partial(compute, way) for name, way in gate.WAYS.items()}
    return Trial(ways, _random([(tokens, inner)] * 3, dtype, device))
