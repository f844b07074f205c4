"""Executes the commands of a service on each rank: train, save, load or sample with an adapter."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from fsdp_qlora.distributed.process_group import release_cached_memory
from fsdp_qlora.service.adapter_store import AdapterState, AdapterStore
from fsdp_qlora.service.commands import (
    Command,
    CreateModel,
    DropModel,
    ForwardBackward,
    LoadWeights,
    OptimStep,
    Sample,
    SaveWeights,
)
from fsdp_qlora.service.messages import Limits, rows_to_score
from fsdp_qlora.service.sampler import RequestSampler
from fsdp_qlora.service.served_images import ServedImages
from fsdp_qlora.service.train_request import TrainRequest
from fsdp_qlora.service.training import RequestTrainer
from fsdp_qlora.sharding.groups import reshard_all
from fsdp_qlora.training.forward import token_logprobs


@dataclass(eq=False)
class Worker:
    """Executes commands for a base; every rank the same ones, in the same order."""

    training: RequestTrainer
    sampling: RequestSampler
    limits: Limits
    """The limits by which rank 0 has checked the requests."""
    images: ServedImages
    models: dict[str, AdapterState] = field(default_factory=dict)

    @property
    def adapters(self) -> AdapterStore:
        return self.training.adapters

    def execute(self, command: Command) -> list[bytes]:
        """The results of a command's requests, the same on every rank.

        Commands on whole models have none: rank 0 knows their answers.

        Raises:
            UserError: on every rank, if a checkpoint cannot be loaded.
        """
        match command:
            case CreateModel():
                self.models[command.model] = self.adapters.make(command.settings)
            case LoadWeights():
                self._load(command)
            case SaveWeights():
                adapter = self.models[command.model]
                folder = Path(command.path)
                self.adapters.save(adapter, folder, with_optimizer=command.with_optimizer)
            case DropModel():
                self._drop(command)
            case ForwardBackward():
                assert command.request is not None  # as it has been sent
                with self.images.at_hand(command.request.contents):
                    return [self._forward_backward(command, command.request)]
            case OptimStep():
                return [self._optim_step(command)]
            case Sample():
                with self.images.at_hand(command.image_contents):
                    return self.sampling.sample(command)
        return []

    def recover(self) -> list[str]:
        """After a failure that all ranks had: be ready for the next command. Called on every rank.

        The adapter in the shards may have changed, so it is given up, whosever it is. Until a whole
        forward pass FSDP2 takes a block that an error left in work for gathered.

        Returns:
            The models that are lost with it: what is in host memory is older.
        """
        self.training.targets.request = None
        lost = [name for name, adapter in self.models.items() if adapter is self.adapters.active]
        for name in lost:
            del self.models[name]
        self.adapters.abandon()
        forward = self.adapters.trainer.forward
        reshard_all(forward.model)
        release_cached_memory(self.adapters.trainer.ranks.device)
        # Any whole pass: every block is gathered and freed once.
        token_logprobs(forward, rows_to_score([[0, 0]]))
        reshard_all(forward.model)
        return lost

    def _load(self, command: LoadWeights) -> None:
        adapter = self.adapters.load(
            Path(command.path), with_optimizer=command.with_optimizer, settings=command.settings
        )
        if self.adapters.active is self.models.get(command.model):
            self.adapters.active = None
        self.models[command.model] = adapter

    def _drop(self, command: DropModel) -> None:
        if self.adapters.active is self.models.pop(command.model, None):
            self.adapters.active = None

    def _forward_backward(self, command: ForwardBackward, request: TrainRequest) -> bytes:
        adapter = self.models[command.model]
        return self.training.forward_backward(adapter, request, command.seq)

    def _optim_step(self, command: OptimStep) -> bytes:
        metrics = self.training.optim_step(self.models[command.model], command.params)
        return json.dumps({"metrics": metrics}).encode()
