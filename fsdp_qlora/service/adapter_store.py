"""The adapters of a service over one base.

One is in the model's shards, the others are in host memory.

The model's adapters have the service's rank. One of a smaller rank fills its first rows of A and
columns of B, and the rest is zero: it then gets no gradient, so that AdamW leaves it zero, and the
product has the smaller rank.
"""

import contextlib
import copy
import dataclasses
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_qlora.checkpoint.checkpoint import (
    STATE,
    DamagedCheckpoint,
    publish_checkpoint,
    verify,
)
from fsdp_qlora.distributed.process_group import gather_numbers, raise_on_all_ranks
from fsdp_qlora.distributed.shards import gather_rows, local_part, own_rows, store_rows
from fsdp_qlora.export.save_results import ResultForm
from fsdp_qlora.export.values import LiveValues
from fsdp_qlora.model.adapters.first_values import first_adapter_value
from fsdp_qlora.model.adapters.insert import adapted_layers, adapter_modules, adapter_parameters
from fsdp_qlora.model.adapters.lora import ExpertsLora, LoraExperts
from fsdp_qlora.model.adapters.peft_folder import WEIGHTS
from fsdp_qlora.service.entries import AdapterSettings
from fsdp_qlora.training.loss_scale import LossScale
from fsdp_qlora.training.trainer import Trainer
from fsdp_qlora.utils.errors import TrainingError, UserError
from fsdp_qlora.utils.files import records_of, write_json

OPTIMIZER = "optimizer.safetensors"
# The names of AdamW's moments in torch's optimizer.
_MOMENTS = ("exp_avg", "exp_avg_sq")
# Words in the paths of layers that train_attn is for; all others are train_mlp's.
_OF_ATTENTION = ("attn", "attention", "mixer", "mamba", "conv", "ssm")


OptimizerState = dict[str, object]
"""A parameter's state in torch's optimizer, by its names."""


class SavedState(TypedDict):
    """The content of state.json."""

    about: AdapterSettings
    steps: int
    loss_scale: dict[str, float]
    has_optimizer: bool


@dataclass(eq=False)
class AdapterState:
    """One adapter, and this rank's rows of it while another one is in the shards."""

    settings: AdapterSettings
    values: dict[str, Tensor]
    """This rank's rows of each parameter, on the CPU."""
    state: dict[str, OptimizerState] = field(default_factory=dict)
    """The optimizer's state; empty while the adapter is in the shards, or before its first step."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of passes without a step; empty while the adapter is in the shards."""
    scale: LossScale = field(default_factory=lambda: LossScale(enabled=False))
    steps: int = 0
    """Optimizer steps."""
    is_snapshot: bool = False
    """Whether it never trains."""

    @property
    def rank(self) -> int:
        return self.settings["rank"]


class AdapterStore:
    """Puts adapters into a loaded model, and saves and loads them. Every rank makes the same calls.

    Args:
        form: of results, with the configuration of the widest adapter.
        options: of the results, for training.json.
    """

    def __init__(
        self, trainer: Trainer, mesh: DeviceMesh, form: ResultForm, options: dict[str, object]
    ) -> None:
        self.trainer = trainer
        self.mesh = mesh
        self.form = form
        self.options = options
        self.parameters: dict[str, nn.Parameter] = dict(adapter_parameters(trainer.model))  # type: ignore[arg-type]
        self.active: AdapterState | None = None
        assert form.adapter is not None
        self.widest = int(form.adapter.r)
        self.alpha = float(form.adapter.lora_alpha)
        # PEFT's form of an experts' adapter has the experts inside of the rank's dim.
        of_experts = [
            each for each in adapter_modules(trainer.model) if isinstance(each, ExpertsLora)
        ]
        self._experts = {
            each: lora.num_experts for lora in of_experts for each in lora.parameters()
        }
        self._names = {parameter: name for name, parameter in self.parameters.items()}

    # --- in and out of the shards ---

    def activate(self, adapter: AdapterState) -> None:
        """Load this adapter into the model."""
        if self.active is adapter:
            return
        self._deactivate()
        optimizer = self.trainer.optimizer
        for name, parameter in self.parameters.items():
            store_rows(parameter, adapter.values[name])
            optimizer.set_state(parameter, adapter.state.get(name, {}))
            if name in adapter.gradients:
                parameter.grad = torch.empty_like(parameter)
                store_rows(parameter.grad, adapter.gradients[name])
        # LoRA's factor depends on the adapter's own rank, not on the widest.
        scaling = self.alpha / adapter.rank
        for layer in adapted_layers(self.trainer.model):
            (layer if isinstance(layer, LoraExperts) else layer.lora).scaling = scaling
        # The shards have them now, and the host's copies would grow old.
        adapter.state = {}
        adapter.gradients = {}
        self.active = adapter
        self.trainer.loss_scale = adapter.scale

    def _deactivate(self) -> None:
        adapter = self.active
        optimizer = self.trainer.optimizer
        if adapter is not None and not adapter.is_snapshot:
            for name, parameter in self.parameters.items():
                adapter.values[name] = local_part(parameter).detach().to("cpu", copy=True)
                state = optimizer.state_of(parameter).items()
                adapter.state[name] = {key: _on_host(value) for key, value in state}
                if parameter.grad is not None:
                    adapter.gradients[name] = local_part(parameter.grad).to("cpu", copy=True)
        self.abandon()

    def is_finite(self) -> bool:
        """Whether all numbers of the adapter in the shards are finite, on every rank.

        Collective.
        """
        # The host waits once for each device, and not for each tensor.
        by_device: dict[torch.device, list[Tensor]] = {}
        for parameter in self.parameters.values():
            local = local_part(parameter)
            by_device.setdefault(local.device, []).append(local.isfinite().all())
        # One rank may have the bad numbers; all must decide alike.
        is_bad = any(not torch.stack(flags).all() for flags in by_device.values())
        return not gather_numbers([float(is_bad)], self.trainer.ranks.device).any()

    def abandon(self) -> None:
        """Give up the adapter in the shards, which a failure may have changed.

        The next adapter takes its place.
        """
        self.trainer.optimizer.zero_grad()
        self.trainer.optimizer.forget()
        self.active = None

    def frozen(self, adapter: AdapterState) -> list[nn.Parameter]:
        """The parameters of the layers that an adapter does not train."""
        return [
            parameter
            for name, parameter in self.parameters.items()
            if not self._trains(adapter, name)
        ]

    @staticmethod
    def _trains(adapter: AdapterState, name: str) -> bool:
        is_attention = any(word in part for part in name.split(".") for word in _OF_ATTENTION)
        return adapter.settings["train_attn"] if is_attention else adapter.settings["train_mlp"]

    # --- made and saved ---

    def make(self, settings: AdapterSettings) -> AdapterState:
        """A new adapter: A random by its seed, B zero; rank 0 is the base, where A is zero too."""
        rank = settings["rank"]
        values = {}
        for name, parameter in self.parameters.items():
            shape = self._narrow(
                parameter, torch.empty(parameter.shape, device="meta"), max(1, rank)
            ).shape
            whole = first_adapter_value(name, shape, seed=settings["seed"]) * (rank > 0)
            values[name] = self._own(parameter, whole)
        return AdapterState(
            settings | {"rank": max(1, rank)},
            values,
            scale=LossScale(enabled=self.trainer.loss_scale.enabled),
            is_snapshot=rank == 0,
        )

    def save(self, adapter: AdapterState, folder: Path, *, with_optimizer: bool) -> None:
        """Save an adapter, complete or not at all.

        The files are PEFT's, the optimizer's, state.json and hashes.

        Raises:
            UserError: on every rank, if it cannot be written.
        """
        self.activate(adapter)
        staging = folder.with_name(f".{folder.name}.writing")
        config = copy.copy(self.form.adapter)
        assert config is not None
        config.r = adapter.rank
        form = dataclasses.replace(self.form, adapter=config)
        options = self.options | {"lora_rank": adapter.rank}
        about = {"facts": {}, "run_id": None, "options": options, "prompt": None}
        with self._writing(staging):
            if self.trainer.ranks.is_rank_0:
                shutil.rmtree(staging, ignore_errors=True)
            values = _Narrowed(self, adapter, keeps=self.trainer.ranks.is_rank_0)
            form.save(values, staging, about=about, progress={"step": adapter.steps})
        # Collective: all ranks gather, and rank 0 writes.
        moments = self._moments(adapter) if with_optimizer and adapter.steps else {}
        with self._writing(staging):
            if self.trainer.ranks.is_rank_0:
                self._write_state(adapter, staging, moments, with_optimizer=with_optimizer)
                files = [path for path in staging.rglob("*") if path.is_file()]
                names = [path.relative_to(staging).as_posix() for path in files]
                hashes = dict(zip(names, records_of(files), strict=True))
                # A folder cannot replace one that is not empty.
                with moved_aside(folder):
                    publish_checkpoint(staging, folder, hashes)

    @contextlib.contextmanager
    def _writing(self, staging: Path) -> Iterator[None]:
        """A block in which rank 0 writes a folder.

        If it cannot, the request fails on all ranks, and the disk space is freed.
        """
        with raise_on_all_ranks(UserError, self.trainer.ranks.device):
            try:
                yield
            except (OSError, SafetensorError, TrainingError) as error:
                shutil.rmtree(staging, ignore_errors=True)
                cause = next((each for each in _causes(error) if isinstance(each, OSError)), error)
                raise UserError(
                    f"The weights cannot be written to the service's folder: {cause}."
                ) from error

    @staticmethod
    def _write_state(
        adapter: AdapterState, folder: Path, moments: dict[str, Tensor], *, with_optimizer: bool
    ) -> None:
        if moments:
            save_file(moments, folder / OPTIMIZER)
        state: SavedState = {
            "about": adapter.settings,
            "steps": adapter.steps,
            "loss_scale": adapter.scale.state(),
            "has_optimizer": with_optimizer,
        }
        write_json(folder / STATE, state)

    def load(
        self, folder: Path, *, with_optimizer: bool, settings: AdapterSettings | None = None
    ) -> AdapterState:
        """Load a saved adapter; without the optimizer it starts its steps anew.

        Args:
            settings: of the model that gets it, if it exists already.
        Raises:
            UserError: on every rank, if it is damaged, or does not fit.
        """
        with raise_on_all_ranks(UserError, self.trainer.ranks.device):
            try:
                if self.trainer.ranks.is_rank_0:
                    verify(folder)
                state: SavedState = json.loads((folder / STATE).read_text())
                rank = state["about"]["rank"]
                if rank > self.widest or (settings and settings["rank"] != rank):
                    own = settings["rank"] if settings else None
                    raise UserError(f"{folder.name} has rank {rank}, and the model {own}.")
                adapter = AdapterState(settings or state["about"], self._read(folder / WEIGHTS))
                if not all(value.isfinite().all() for value in adapter.values.values()):
                    raise UserError(f"{folder.name} has numbers that are not finite.")
                adapter.scale = LossScale(enabled=self.trainer.loss_scale.enabled)
                if with_optimizer and state["has_optimizer"]:
                    adapter.steps = state["steps"]
                    adapter.scale.load_state(state["loss_scale"])
                    # Before the first step there is no file of the optimizer.
                    if adapter.steps:
                        adapter.state = self._read_state(adapter, folder)
            except (OSError, SafetensorError, DamagedCheckpoint, KeyError, ValueError) as error:
                raise UserError(f"{folder.name} cannot be loaded: {error}") from error
        return adapter

    def _read_state(self, adapter: AdapterState, folder: Path) -> dict[str, OptimizerState]:
        """The optimizer's state of the parameters that an adapter trains, by their names."""
        parts = {key: self._read(folder / OPTIMIZER, f".{key}") for key in _MOMENTS}
        count = torch.tensor(float(adapter.steps))
        state: dict[str, OptimizerState] = {}
        for name in self.parameters:
            if self._trains(adapter, name):
                # torch's AdamW counts the steps of each parameter, in place.
                state[name] = {"step": count.clone()}
                state[name] |= {key: parts[key][name] for key in _MOMENTS}
        return state

    def _read(self, path: Path, suffix: str = "") -> dict[str, Tensor]:
        with safe_open(path, framework="pt") as file:
            return {
                name: self._own(parameter, file.get_tensor(f"{name}{suffix}").float())
                for name, parameter in self.parameters.items()
                if not suffix or f"{name}{suffix}" in file.keys()  # noqa: SIM118
            }

    def _moments(self, adapter: AdapterState) -> dict[str, Tensor]:
        """AdamW's moments, whole on rank 0. Collective."""
        found = {}
        for name, parameter in self.parameters.items():
            if self._trains(adapter, name):
                state = self.trainer.optimizer.state_of(parameter)
                local = local_part(parameter).detach()
                # In the order of `_MOMENTS` on every rank. A parameter that has had no gradient has
                # no moments, which are zero then.
                for key in _MOMENTS:
                    rows = state.get(key, torch.zeros_like(local))
                    whole = gather_rows(rows, parameter.shape[0], self.mesh)
                    narrow = self._narrow(parameter, whole, adapter.rank)
                    found[f"{name}.{key}"] = narrow.cpu().contiguous()
        return found

    # --- ranks ---

    def _own(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """This rank's rows of an adapter of some rank, widened."""
        first, last = own_rows(parameter, self.mesh)
        return self._widened(parameter, whole)[first:last].contiguous()

    def _by_rank(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """A whole A as [experts, rank, in] or B as [out, rank, experts].

        A linear layer is one expert.
        """
        experts = self._experts.get(parameter, 1)
        if "lora_A" in self._names[parameter]:
            return whole.view(experts, -1, whole.shape[1])
        return whole.view(len(whole), -1, experts)

    def _widened(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        parts = self._by_rank(parameter, whole)
        return F.pad(parts, (0, 0, 0, self.widest - parts.shape[1])).reshape(parameter.shape)

    def _narrow(self, parameter: nn.Parameter, whole: Tensor, rank: int) -> Tensor:
        """The part of a whole A or B of the widest rank that one of this rank fills."""
        parts = self._by_rank(parameter, whole)[:, :rank]
        return parts.flatten(0, 1) if "lora_A" in self._names[parameter] else parts.flatten(1)


class _Narrowed(LiveValues):
    """The values of an adapter in its own rank."""

    def __init__(self, adapters: AdapterStore, adapter: AdapterState, *, keeps: bool) -> None:
        super().__init__(keeps=keeps)
        self._adapters = adapters
        self._adapter = adapter

    def whole(self, tensor: Tensor) -> Tensor:
        return self._adapters._narrow(tensor, super().whole(tensor), self._adapter.rank)  # type: ignore[arg-type]


@contextlib.contextmanager
def moved_aside(folder: Path) -> Iterator[None]:
    """Rename a folder, if it exists, for the duration of the block.

    Afterwards it is deleted, or put back after a failure.
    """
    old = folder.with_name(f".{folder.name}.old")
    if not folder.exists():
        yield
        return
    shutil.rmtree(old, ignore_errors=True)
    folder.rename(old)
    try:
        yield
    except BaseException:
        if not folder.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it came from."""
    while error is not None:
        yield error
        error = error.__cause__


def _on_host(value: object) -> object:
    return value.to("cpu", copy=True) if isinstance(value, Tensor) else value
