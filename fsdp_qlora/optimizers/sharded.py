"""Optimizers over local shards, the learning rate of each step, and the global gradient norm."""

import contextlib
import importlib.util
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import bitsandbytes
import torch
from torch import nn

from fsdp_qlora.adapters.insert import adapter_modules
from fsdp_qlora.distributed import local_part
from fsdp_qlora.errors import UserError
from fsdp_qlora.optimizers.flat import Member, Piece, find_pieces, is_second, is_small
from fsdp_qlora.optimizers.matrix import Adafactor, MatrixOptimizer, Muon


def _schedule_free(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    import schedulefree  # optional

    return schedulefree.AdamWScheduleFree(parameters, **options)


def _adam(kind: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """Use the fused kernel if all parameters are on a GPU: torch's default needs 4 more bytes per weight."""

    def build(parameters: Any, **options: Any) -> torch.optim.Optimizer:
        groups = [group["params"] if isinstance(group, dict) else [group] for group in parameters]
        fused = all(parameter.is_cuda for group in groups for parameter in group)
        return kind(parameters, fused=fused or None, **options)  # type: ignore[call-arg]

    return build


# name -> optimizer over a list of parameters (or groups of them), given lr and weight_decay.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": _adam(torch.optim.AdamW),
    "adam": _adam(torch.optim.Adam),
    "sgd": torch.optim.SGD,
    "adadelta": torch.optim.Adadelta,
    "fused_adamw": lambda parameters, **options: torch.optim.AdamW(parameters, fused=True, **options),
    "fused_adam": lambda parameters, **options: torch.optim.Adam(parameters, fused=True, **options),
    "adamw_8bit": bitsandbytes.optim.AdamW8bit,
    "paged_adamw_8bit": bitsandbytes.optim.PagedAdamW8bit,
    "lion": bitsandbytes.optim.Lion,
    "lion_8bit": bitsandbytes.optim.Lion8bit,
    "adafactor": Adafactor,
    "muon": Muon,
    "schedule_free_adamw": _schedule_free,
}

# Float32 values of state per trainable parameter, to estimate memory. 8-bit: one byte, and a float32 per 256.
OPTIMIZER_STATES: dict[str, float] = {
    **{"adamw": 2, "adam": 2, "sgd": 0, "adadelta": 2, "fused_adamw": 2, "fused_adam": 2},
    **{"adamw_8bit": 2 * 65 / 256, "paged_adamw_8bit": 2 * 65 / 256, "lion": 1, "lion_8bit": 65 / 256},
    **{"adafactor": 0, "muon": 1, "schedule_free_adamw": 2},
}

_ADAM = {"step", "exp_avg", "exp_avg_sq"}
_8BIT_1, _8BIT_2 = {"state1", "absmax1", "qmap1"}, {"state2", "absmax2", "qmap2"}
_ADAM_8BIT = ({"step", "state1", "state2"}, {"step", *_8BIT_1, *_8BIT_2})  # of small and of large parameters

# name -> the keys of a parameter's state after a step: one of these sets.
STATE_KEYS: dict[str, Sequence[set[str]]] = {
    **dict.fromkeys(("adamw", "adam", "fused_adamw", "fused_adam"), (_ADAM,)),
    **dict.fromkeys(("adamw_8bit", "paged_adamw_8bit"), _ADAM_8BIT),
    "sgd": (set(),),
    "adadelta": ({"step", "square_avg", "acc_delta"},),
    "lion": ({"step", "state1"},),
    "lion_8bit": ({"step", "state1"}, {"step", *_8BIT_1}),
    "adafactor": ({"step", "var"}, {"step", "row_var", "col_var"}),
    "muon": ({"momentum_buffer"},),
    "schedule_free_adamw": ({"z", "exp_avg_sq"},),
}

_PAGED_STATES = ("state1", "state2")  # of bitsandbytes' optimizers

# name -> multiple of the peak learning rate at a progress in [0, 1] after the warm-up.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def learning_rate(step: int, *, peak: float, schedule: str, warmup_steps: int, total_steps: int) -> float:
    """The learning rate of optimizer step `step`, counted from 0: linear warm-up, then the schedule."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return peak * SCHEDULES[schedule](progress)


def check_optimizer(name: str, device: torch.device) -> None:
    """Refuse an optimizer that cannot run here.

    Raises:
        UserError: it is paged and there is no GPU, or its package is not installed.
    """
    if name.startswith("paged_") and device.type != "cuda":
        raise UserError(
            f"optimizer {name} moves its state between GPU and host memory, and there is no GPU. Use "
            f"{name.removeprefix('paged_')}."
        )
    if name == "schedule_free_adamw" and importlib.util.find_spec("schedulefree") is None:
        raise UserError(f"optimizer {name} needs the package schedulefree: pip install schedulefree.")


class ShardedOptimizer:
    """A plain torch optimizer over each rank's own shards.

    It gets local tensors that share the shards' memory. So every element-wise optimizer works sharded, without
    the cost of DTensor dispatch for hundreds of small tensors, and takes the adapters' shards as one tensor where they
    lie side by side (flat.py). Optimizers over whole matrices know which part of the matrix a local tensor is
    (matrix.py).

    Args:
        lr_ratio_B: LoRA+ (Hayou et al. 2024): the learning rate of B (and of vectors) is this many times A's.
    """

    def __init__(self, model: nn.Module, name: str, *, lr: float, weight_decay: float, lr_ratio_B: float = 1.0) -> None:
        self.name, build = name, OPTIMIZERS[name]
        # Its steps are collective, so every rank must take part, also without rows.
        is_matrix = isinstance(build, type) and issubclass(build, MatrixOptimizer)
        trained = {
            path: parameter
            for path, parameter in model.named_parameters()
            if parameter.requires_grad and (is_matrix or local_part(parameter).numel() > 0)
        }

        def kind(path: str, parameter: nn.Parameter) -> tuple[bool, bool]:
            return lr_ratio_B != 1.0 and is_second(path, parameter), name.endswith("_8bit") and is_small(parameter)

        adapters = [parameter for adapter in adapter_modules(model) for parameter in adapter.parameters()]
        with torch.no_grad():
            self.pieces = find_pieces(trained, () if is_matrix else adapters, kind)
        groups: list[Any] = [piece.tensor for piece in self.pieces]
        if lr_ratio_B != 1.0:
            kinds = [kind(path, parameter)[0] for path, parameter in trained.items()]
            is_B = [kinds[piece.members[0].number] for piece in self.pieces]
            groups = [
                {"params": [tensor for tensor, B in zip(groups, is_B, strict=True) if B is second], "lr_scale": scale}
                for second, scale in ((False, 1.0), (True, lr_ratio_B))
            ]
        self._gradients: list[torch.Tensor] = []  # of the members, in the model's order
        self._member_of = _members(self.pieces)
        self._loaded: dict[int, dict[str, Any]] = {}  # states of some members of a flat piece, by parameter's id
        # A rank may own no element of a small adapter; optimizers refuse an empty list.
        self.optimizer = build(groups, lr=lr, weight_decay=weight_decay) if self.pieces else None
        if isinstance(self.optimizer, MatrixOptimizer):
            self.optimizer.whole = {piece.tensor: piece.members[0].sharded for piece in self.pieces}
        if self._is_schedule_free:
            self.optimizer.train()  # type: ignore[union-attr]

    @property
    def _is_schedule_free(self) -> bool:
        return hasattr(self.optimizer, "eval")

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """In this block the weights are those to evaluate and save: for schedule-free optimizers the average."""
        if not self._is_schedule_free:
            yield
            return
        self.optimizer.eval()  # type: ignore[union-attr]
        try:
            yield
        finally:
            self.optimizer.train()  # type: ignore[union-attr]

    # --- a step ---

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Take the gradients that FSDP2 has reduced onto this rank; the parameters lose those of flat pieces."""
        for piece in [piece for piece in self.pieces if piece.lacks_some_gradient]:
            self._split(piece)
        taken = [pair for piece in self.pieces for pair in zip(piece.members, piece.take_gradients(), strict=False)]
        self._gradients = [gradient for member, gradient in sorted(taken, key=lambda pair: pair[0].number)]

    @torch.no_grad()
    def squared_norms(self) -> list[torch.Tensor]:
        """Sums of squares of this rank's gradients, float64 [], one for each device that has some.

        Offloaded gradients are on the CPU, the others on the GPU. Nothing waits for the GPU here.
        """
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for gradient in self._gradients:
            by_device.setdefault(gradient.device, []).append(gradient)
        return [torch.nn.utils.get_total_norm(gradients).double().square() for gradients in by_device.values()]

    @torch.no_grad()
    def scale_gradients(self, factor: float) -> None:
        gradients = [piece.tensor.grad for piece in self.pieces if piece.tensor.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def step(self, lr: float) -> None:
        if self.optimizer is None:
            return
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        self._make_small_states()
        self.optimizer.step()

    def _make_small_states(self) -> None:
        """Make the states of pieces of small shards in 32 bits, as bitsandbytes would make each shard's."""
        arguments = getattr(self.optimizer, "args", None)
        if self.optimizer is None or arguments is None or arguments.optim_bits != 8:
            return
        for piece in self.pieces:
            is_new = piece.tensor.grad is not None and not self.optimizer.state.get(piece.tensor)
            if is_new and piece.is_flat and is_small(piece.members[0].local):
                number = self._group_of(piece.tensor)
                arguments.optim_bits = 32
                self.optimizer.init_state(self.optimizer.param_groups[number], piece.tensor, number, 0)  # type: ignore[attr-defined]
                arguments.optim_bits = 8

    def _group_of(self, tensor: nn.Parameter) -> int:
        assert self.optimizer is not None
        groups = enumerate(self.optimizer.param_groups)
        return next(number for number, group in groups if any(tensor is other for other in group["params"]))

    def zero_grad(self) -> None:
        self._gradients = []
        for piece in self.pieces:
            piece.tensor.grad = None
            for member in piece.members:
                member.sharded.grad = None

    # --- state ---

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The optimizer's own values for one of the model's parameters, to read; empty before a step."""
        found = self._member_of.get(id(parameter))
        if self.optimizer is None or found is None or found[0].tensor not in self.optimizer.state:
            return {}
        piece, member = found
        return piece.state_of(member, self.optimizer.state[piece.tensor])

    def set_state(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        """Replace the values for one of the model's parameters, which `state` then belongs to.

        Those of a flat piece count once each of its parameters has been given its values, empty ones too.
        """
        found = self._member_of.get(id(parameter))
        if self.optimizer is None or found is None:
            return
        piece, _ = found
        self._loaded[id(parameter)] = state
        states = [self._loaded.get(id(member.sharded)) for member in piece.members]
        if any(each is None for each in states):
            return
        given = [each for each in states if each is not None]
        joined = piece.joined(given, self._new_state)
        parts = [(piece, joined)] if joined is not None else list(zip(self._split(piece), given, strict=True))
        for part, values in parts:
            if values:
                self.optimizer.state[part.tensor] = values if part.is_flat else self._paged(part.tensor, values)
        for member in piece.members:
            del self._loaded[id(member.sharded)]

    def _new_state(self, tensor: nn.Parameter, key: str, like: torch.Tensor) -> torch.Tensor:
        """Zeros for a tensor's state, of the type and in the place of `like`.

        Those of a paged optimizer may move between GPU and host at any time, and count as CPU memory.
        """
        if key in _PAGED_STATES and getattr(self.optimizer, "is_paged", False):
            buffer: torch.Tensor = self.optimizer.get_state_buffer(tensor, dtype=like.dtype)  # type: ignore[union-attr]
            return buffer
        return torch.zeros_like(tensor, dtype=like.dtype, device=like.device)

    def _paged(self, tensor: nn.Parameter, state: dict[str, Any]) -> dict[str, Any]:
        if not getattr(self.optimizer, "is_paged", False):
            return state
        paged = [key for key in _PAGED_STATES if key in state]
        return state | {key: self._new_state(tensor, key, state[key]).copy_(state[key]) for key in paged}

    def _split(self, piece: Piece) -> list[Piece]:
        """Give each parameter of a flat piece a tensor of its own from now on, with the state that it has.

        For parameters that do not all get a gradient in the same steps: an optimizer passes over those without.
        """
        assert self.optimizer is not None
        parts = list(piece.split(self.optimizer.state.pop(piece.tensor, {})))
        for part, state in parts:
            if state:
                self.optimizer.state[part.tensor] = state
        tensors = self.optimizer.param_groups[self._group_of(piece.tensor)]["params"]
        place = next(place for place, tensor in enumerate(tensors) if tensor is piece.tensor)
        pieces = [part for part, _ in parts]
        tensors[place : place + 1] = [part.tensor for part in pieces]
        self.pieces = [each for each in self.pieces if each.tensor is not piece.tensor] + pieces
        self._member_of = _members(self.pieces)
        return pieces

    def room_for_state(self) -> list[torch.Tensor]:
        """Memory of the size of the state that the first step will allocate; nothing if there is state already.

        Nothing for paged optimizers, whose state is not in GPU memory alone.
        """
        if self.optimizer is None or self.optimizer.state or self.name.startswith("paged_"):
            return []
        sizes = [int(OPTIMIZER_STATES[self.name] * piece.tensor.numel()) for piece in self.pieces]
        return [
            torch.empty(size, dtype=torch.float32, device=piece.tensor.device)
            for size, piece in zip(sizes, self.pieces, strict=True)
            if size
        ]

    @property
    def stored_as(self) -> dict[str, str]:
        """State key -> kind of train_state.py, where the shape alone does not determine it."""
        return self.optimizer.stored_as if isinstance(self.optimizer, MatrixOptimizer) else {}

    def group_values(self) -> list[dict[str, Any]]:
        """The optimizer's values that are not per parameter, by parameter group."""
        groups = self.optimizer.param_groups if self.optimizer else []
        return [
            {name: value for name, value in group.items() if isinstance(value, (bool, int, float, str))}
            for group in groups
        ]

    def set_group_values(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Restore the result of `group_values`."""
        if self.optimizer is not None:
            for group, values in zip(self.optimizer.param_groups, groups, strict=True):
                group.update(values)

    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank."""
        states: Iterable[dict[str, Any]] = self.optimizer.state.values() if self.optimizer else ()
        return sum(
            value.numel() * value.element_size()
            for state in states
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )


def averaged_value(name: str, value: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """The value to evaluate and save of a parameter as it is in training: for schedule-free optimizers the average.

    Args:
        z: the optimizer's state of that name for the parameter.
    """
    if OPTIMIZERS[name] is not _schedule_free:
        return value
    parameter = nn.Parameter(value)
    optimizer = _schedule_free([parameter], lr=1.0)
    optimizer.train()  # type: ignore[attr-defined]
    optimizer.state[parameter]["z"] = z
    optimizer.eval()  # type: ignore[attr-defined]
    return parameter.detach()


def _members(pieces: Iterable[Piece]) -> dict[int, tuple[Piece, Member]]:
    """Parameter's id -> where it is."""
    return {id(member.sharded): (piece, member) for piece in pieces for member in piece.members}
