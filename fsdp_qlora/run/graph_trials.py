"""Trials of decoder blocks as CUDA graphs: one of each kind is proved, and the first one is timed.

Weights are random.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedModel

from fsdp_qlora.config.train_types import TrainType
from fsdp_qlora.data.batches.graph_lengths import filled_length
from fsdp_qlora.data.batches.micro_batch import describe_documents
from fsdp_qlora.distributed.device import to_device
from fsdp_qlora.model.adapters.insert import LoraOptions
from fsdp_qlora.model.architecture.attention import attending, reads_bounds
from fsdp_qlora.model.architecture.decoder import find_blocks, kind_of
from fsdp_qlora.model.architecture.precision import PRECISIONS, Precision
from fsdp_qlora.model.build_model import LayerOptions, build_model
from fsdp_qlora.model.kernels.in_use import (
    GRAPHS,
    PLAIN,
    Ways,
    using_ways,
    ways_in_use,
    ways_of_option,
)
from fsdp_qlora.model.kernels.trial import PartTrials, Trial
from fsdp_qlora.model.quantizers.base import QuantizedWeight
from fsdp_qlora.sharding.graphed import GraphedBlocks, why_not
from fsdp_qlora.sharding.recompute import set_graphs, wrap_blocks

if TYPE_CHECKING:  # the process of trials needs neither, and starts sooner
    from fsdp_qlora.config.options import TrainConfig
    from fsdp_qlora.planning.plan import ModelPlan

# Tokens of a document in the proof. In longer ones attention's kernels add up gradients in an order
# that differs from call to call.
_SHORT = 64
_DOCUMENTS = 3
# Kinds of blocks that are proved. In a run each block proves itself, too.
_MOST_KINDS = 4
# Random bytes below this are finite numbers, in whatever format codes and statistics are.
_FINITE = 64


class BlockForm(NamedTuple):
    """The model and the options that a block is built from. It goes to a process as JSON.

    config: as in config.json. lora: as `LoraOptions`. options: the quantizer's. attention: as the
    option asks for it. documents: as in `ModelPlan`. num_tokens: of the longest micro-batch.
    """

    config: dict[str, Any]
    adapter: str | None
    quantizer: str | None
    precision: str
    lora: dict[str, Any]
    options: dict[str, Any]
    attention: str
    documents: str | None
    num_tokens: int = 0

    @classmethod
    def of(
        cls, config: "TrainConfig", plan: "ModelPlan", layers: LayerOptions
    ) -> "BlockForm | None":
        """The form of a planned model's blocks; None where they have no graphs anyway."""
        kind = config.kind
        quantizer = kind.quantizer
        options = dict(layers.quantizer)
        if plan.packed is not None:
            stored = plan.packed.layer_options()
            if not plan.packed.quantizer or stored is None:
                return None
            quantizer = plan.packed.quantizer
            options = dict(stored)
        # Code of a model's own is not run in another process.
        is_ours = not config.trust_remote_code and config.context_size == 1
        if kind.trains != "adapter" or not is_ours:
            return None
        return cls(
            config=_as_json(plan.config.to_dict()),
            adapter=kind.adapter,
            quantizer=quantizer,
            precision=plan.precision.name,
            lora=_as_json(asdict(layers.lora)),
            options=_as_json(options),
            attention=config.attn_implementation,
            documents=plan.documents,
        )

    def build(self, device: torch.device, *, of_each_kind: bool = False) -> PreTrainedModel:
        """The model with its first block alone, in memory of the device, and no embeddings.

        of_each_kind: one block of each kind that may have graphs.
        """
        precision = PRECISIONS[self.precision]
        fields = dict(self.config)
        config = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
        kind = TrainType(self.adapter, self.quantizer, "adapter")
        lora = LoraOptions(**self.lora)
        meta = build_model(
            config,
            kind,
            precision,
            device,
            LayerOptions(lora, self.options),
            attn_implementation=self.attention,
        )
        model = meta.model
        blocks = find_blocks(model)
        _keep(model, _one_of_each_kind(blocks) if of_each_kind else [0])
        embedding = model.get_input_embeddings()
        head = model.get_output_embeddings()
        generator = torch.Generator(device).manual_seed(0)
        for module in model.modules():
            if module not in (embedding, head):
                _fill(module, precision, generator)
        wrap_blocks(model, offload=False)
        return model.train()


def _one_of_each_kind(blocks: nn.ModuleList) -> list[int]:
    """The places of blocks that may have graphs, one of each kind; the first if none may."""
    first: dict[object, int] = {}
    for place, block in enumerate(blocks):
        if not why_not(block):
            first.setdefault(kind_of(block), place)
    return [*first.values()][:_MOST_KINDS] or [0]


def _keep(model: PreTrainedModel, places: list[int]) -> None:
    """Leave these of a model's blocks."""
    blocks = find_blocks(model)
    kept = [blocks[place] for place in places]
    del blocks[:]
    blocks.extend(kept)
    # By it the model finds the mask and the rotary tables of its first block, its second and so on.
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None)
    if types:
        config.layer_types = [types[place] for place in places]


def _as_json(value: Any) -> Any:
    """The value as JSON has it, without what it cannot have."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value if isinstance(value, str | int | float) else None


@torch.no_grad()
def _fill(module: nn.Module, precision: Precision, generator: torch.Generator) -> None:
    """Give a module's own parameters memory and random values."""
    device = generator.device
    for name, parameter in list(module.named_parameters(recurse=False)):
        dtype = parameter.dtype
        if parameter.requires_grad and precision.param_dtype is not None:
            dtype = precision.param_dtype
        values = torch.empty_like(parameter, device=device, dtype=dtype)
        if isinstance(module, QuantizedWeight) and name in ("weight", *module.statistics):
            values.view(-1).view(torch.uint8).random_(0, _FINITE, generator=generator)
        else:
            values.normal_(0, 0.02, generator=generator)
        values.requires_grad_(parameter.requires_grad)
        setattr(module, name, nn.Parameter(values, requires_grad=parameter.requires_grad))
    for name, buffer in list(module.named_buffers(recurse=False)):
        setattr(module, name, buffer.to(device))


def graph_trials(form: BlockForm, lengths: list[int], device: torch.device) -> PartTrials:
    """The trials of blocks on micro-batches with rows of these lengths."""
    short = [min(_SHORT, lengths[0])] * _DOCUMENTS
    proof = partial(_trial, form, short, device)
    timed = partial(_timed, form, lengths, device)
    return PartTrials(
        "blocks",
        [GRAPHS],
        [proof],
        timed,
        apart=[GRAPHS],
    )


def _timed(form: BlockForm, lengths: list[int], device: torch.device) -> Trial:
    """A trial by the ways in use, as far as they are chosen."""
    ways = ways_in_use()._replace(linears=ways_of_option("auto").linears)
    return _trial(form, lengths, device, ways)


def _trial(
    form: BlockForm, lengths: list[int], device: torch.device, others: Ways | None = None
) -> Trial:
    tried = _TriedBlocks(form, lengths, device, of_each_kind=others is None)
    tried.others = others or tried.others
    ways = {
        PLAIN: tried.plain,
        GRAPHS: tried.by_graphs,
    }
    return Trial(ways, tried.inputs())


class _TriedBlocks:
    """A model of few blocks, and the arguments of a micro-batch with rows of these lengths.

    others: how its parts are computed.
    """

    def __init__(
        self, form: BlockForm, lengths: list[int], device: torch.device, *, of_each_kind: bool
    ) -> None:
        self.others = ways_of_option("auto")
        self._precision = PRECISIONS[form.precision]
        self._device = device
        self._implementation = form.documents
        self._model = form.build(device, of_each_kind=of_each_kind)
        self._size = (len(lengths), lengths[0])
        self._documents: dict[str, Any] = {}
        if form.documents is not None:
            length = filled_length(sum(lengths))
            self._size = (1, length)
            described = describe_documents(lengths, num_parts=length)
            self._documents = to_device(described, device)
        self._graphs = GraphedBlocks(
            math.prod(self._size),
            by_bounds=reads_bounds(self._model.config, form.documents),
            is_trial=True,
        )
        parameters = self._model.parameters()
        self._trained = [each for each in parameters if each.requires_grad]

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Random hidden states, and a gradient of the results."""
        both = torch.empty(
            2,
            *self._size,
            self._model.config.get_text_config().hidden_size,
            dtype=self._precision.param_dtype or torch.float32,
            device=self._device,
        )
        generator = torch.Generator(self._device).manual_seed(0)
        x, grad_y = both.normal_(generator=generator)
        return x, grad_y

    def plain(self, x: torch.Tensor, grad_y: torch.Tensor) -> list[torch.Tensor]:
        """The results and all gradients, without graphs."""
        set_graphs(self._model, None)
        return self._compute(x, grad_y)

    def by_graphs(self, x: torch.Tensor, grad_y: torch.Tensor) -> list[torch.Tensor]:
        """The same with graphs. Raises RuntimeError where there can be none."""
        graphs = self._graphs
        set_graphs(self._model, graphs)
        # A form of inputs is captured when it comes again.
        while not graphs.nbytes and not graphs.reasons:
            self._compute(x, grad_y)
        if graphs.reasons:
            raise RuntimeError(graphs.reasons[0])
        return self._compute(x, grad_y)

    def _compute(self, x: torch.Tensor, grad_y: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        # The backward pass computes the block again, by the same ways.
        with (
            attending(self._model, self._implementation),
            using_ways(self.others),
        ):
            with self._precision.autocasting(self._device):
                output = self._model.base_model(
                    inputs_embeds=x,
                    use_cache=False,
                    **self._documents,
                )
            y = output[0]
            found = torch.autograd.grad(
                y,
                [x, *self._trained],
                grad_y,
                allow_unused=True,
            )
        return [y.detach(), *(each for each in found if each is not None)]
