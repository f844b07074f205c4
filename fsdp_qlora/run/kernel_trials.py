"""Trials of each part's kernels with the sizes of a model's blocks, on random numbers."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fsdp_qlora.model.architecture.attention import VARLEN
from fsdp_qlora.model.architecture.attention_kernels import FLASH4
from fsdp_qlora.model.architecture.attention_ways import (
    attention_inputs,
    attention_ways,
    exact_attention,
)
from fsdp_qlora.model.architecture.rms_norm import RmsNorm
from fsdp_qlora.model.architecture.shapes import BlockShape, block_shapes, has_silu
from fsdp_qlora.model.kernels import gate, norm, rotary, token_loss
from fsdp_qlora.model.kernels.in_use import PLAIN, TRITON
from fsdp_qlora.model.kernels.rounding import triton
from fsdp_qlora.model.kernels.trial import PartTrials, Trial
from fsdp_qlora.run.answer_trials import answer_trials
from fsdp_qlora.run.decoding_trials import WeightForm, decoding_trials, weight_forms
from fsdp_qlora.run.graph_trials import BlockForm, graph_trials
from fsdp_qlora.run.rounding_trials import rounding_trials

if TYPE_CHECKING:  # the process of trials needs neither, and starts sooner
    from fsdp_qlora.config.options import TrainConfig
    from fsdp_qlora.planning.plan import ModelPlan

# Tokens of a proof, and at most of what is timed: a kernel's time grows with them.
_FEW = 37
_MANY = 2048
_MOST = 16_384
_CHUNK = 512  # tokens whose logits are in memory at once
# Lengths of documents that attention is proved with: cuDNN's kernel takes equal ones alone.
_DOCUMENTS = ([37, 91, 128], [128, 128])
_LONG_DOCUMENT = 1024
_EPS = 1e-6


class NormForm(NamedTuple):
    """A norm's form, by its name in kernels/norm.py, and the number of its weights."""

    name: str
    width: int


@dataclass(frozen=True)
class KernelForm:
    """The properties of a run that its kernels depend on. It goes to another process as JSON."""

    shapes: list[BlockShape]
    """The sizes of its models' blocks, each once."""
    dtype: str
    """The dtype that blocks compute in, such as bfloat16."""
    rows: int
    """The rows of the run's longest micro-batch."""
    longest: int
    """The tokens of its longest row."""
    has_silu: bool = False
    """Whether its MLPs have a gate with SiLU."""
    norms: list[NormForm] = field(default_factory=list)
    """The norms of its models, each kind once."""
    weights: list[WeightForm] = field(default_factory=list)
    """How weights of its base are quantized."""
    vocabulary: int = 0
    """The columns of its head."""
    has_varlen: bool = False
    """Whether torch's kernel for documents of any lengths computes its attention."""
    deterministic: bool = False
    """Whether another run of the same must have the same bits."""
    graphed: list[str] = field(default_factory=list)
    """The parts that may be graphs: blocks, answers."""
    block: BlockForm | None = None
    """The blocks of its model that trains, if they may be graphs."""

    @classmethod
    def of(cls, config: "TrainConfig", *plans: "ModelPlan") -> "KernelForm":
        """The form of a run with the planned models: the one that trains, then a teacher."""
        plan = plans[0]
        modules = [module for each in plans for module in each.meta.model.modules()]
        shapes = [shape for each in plans for shape in block_shapes(each.config)]
        norms = {
            NormForm(module.form, len(module.weight))
            for module in modules
            if isinstance(module, RmsNorm)
        }
        return cls(
            shapes=[*dict.fromkeys(shapes)],
            dtype=str(plan.precision.compute_dtype).removeprefix("torch."),
            rows=config.batch_size,
            longest=config.longest_row,
            has_silu=any(has_silu(each.config) for each in plans),
            norms=sorted(norms),
            weights=weight_forms(modules),
            vocabulary=plan.meta.model.get_input_embeddings().num_embeddings,
            has_varlen=plan.documents == VARLEN,
            deterministic=config.deterministic,
        )

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "KernelForm":
        """A form that came as JSON."""
        shapes = [BlockShape(*shape) for shape in fields["shapes"]]
        weights = [
            WeightForm(kernel, tuple(settings), *others)
            for kernel, settings, *others in fields["weights"]
        ]
        norms = [NormForm(*each) for each in fields["norms"]]
        made = {"shapes": shapes, "weights": weights, "norms": norms}
        if fields.get("block") is not None:
            made["block"] = BlockForm(*fields["block"])
        return cls(**{**fields, **made})

    def to_dict(self) -> dict[str, Any]:
        """The form as JSON has it."""
        fields = dataclasses.asdict(self)
        weights = [[form.kernel, list(form.settings), form.is_rounded] for form in self.weights]
        return fields | {
            "shapes": [list(shape) for shape in self.shapes],
            "weights": weights,
            "norms": [list(form) for form in self.norms],
            "block": None if self.block is None else list(self.block),
        }

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch has it."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def lengths(self) -> list[int]:
        """The lengths of the longest micro-batch's rows, as far as they are tried."""
        longest = min(self.longest, _MOST)
        return [longest] * min(self.rows, _MOST // longest)

    @property
    def tokens(self) -> int:
        """The tokens of these rows."""
        return sum(self.lengths)


def trials(form: KernelForm, device: torch.device) -> list[PartTrials]:
    """The parts of such a model that have other ways on this device."""
    return [*_trials(form, device)]


def _trials(form: KernelForm, device: torch.device) -> Iterator[PartTrials]:
    dtype = form.torch_dtype
    # The widest block stands for all.
    shape = max(form.shapes, key=lambda shape: (shape.inner, shape.attended))
    yield _by_tokens("rotary", form, partial(_rotary, dtype, device, shape))
    if form.has_silu and shape.inner:
        yield _by_tokens("gate", form, partial(_gate, dtype, device, shape.inner))
    if form.weights:
        yield _of_decoding(form, shape, device)
    if any(each.is_rounded for each in form.weights):
        yield _of_rounding(form, shape, device)
    # The others have other bits than the plain way. What is faster by a little may change from
    # start to start.
    if form.deterministic:
        return
    if form.norms:
        yield _by_tokens("norm", form, partial(_norm, dtype, device, form.norms))
    # In float32 there is no other way.
    if form.vocabulary and dtype.itemsize == 2:
        make = partial(_loss, dtype, device, form.vocabulary)
        few = min(form.tokens, _CHUNK)
        proofs = [
            partial(make, _FEW),
            partial(make, few),
        ]
        yield _of_triton("loss", proofs, partial(make, few))
    if form.has_varlen:
        yield _of_attention(form, device)
    if form.block is None:
        return
    if "answers" in form.graphed:
        yield answer_trials(form.block, device)
    # The last one: `TriedKernels` times it by the ways of the others.
    if "blocks" in form.graphed:
        lengths = [max(form.block.num_tokens // form.rows, 1)] * form.rows
        yield graph_trials(form.block, lengths, device)


def _by_tokens(part: str, form: KernelForm, make: Callable[[int], Trial]) -> PartTrials:
    """The trials of a part whose work is a number of tokens."""
    many = min(_MANY, form.tokens)
    proofs = [
        partial(make, _FEW),
        partial(make, many),
    ]
    return _of_triton(part, proofs, partial(make, form.tokens))


def _of_triton(
    part: str, proofs: Sequence[Callable[[], Trial]], timed: Callable[[], Trial]
) -> PartTrials:
    ways = [TRITON] if triton else []
    missing = {} if ways else {TRITON: "not installed"}
    return PartTrials(
        part,
        ways,
        proofs,
        timed,
        apart=ways,
        missing=missing,
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

    sizes = [(tokens, inner)] * 3
    return Trial.of(gate.WAYS, compute, *_random(sizes, dtype, device))


def _rotary(dtype: torch.dtype, device: torch.device, shape: BlockShape, tokens: int) -> Trial:
    def compute(way: Callable[..., rotary.Pair], *tensors: torch.Tensor) -> list[torch.Tensor]:
        return [*way(*tensors, False), *way(*tensors, True)]

    size = shape.head_dim
    table = (1, tokens, size)
    sizes = [
        (1, tokens, shape.heads, size),
        (1, tokens, shape.groups, size),
        table,
        table,
    ]
    query, key, cos, sin = _random(sizes, dtype, device)
    # as projections leave them in memory: a token's heads beside each other
    query = query.transpose(1, 2)
    key = key.transpose(1, 2)
    return Trial.of(rotary.WAYS, compute, query, key, cos, sin)


def _norm(
    dtype: torch.dtype, device: torch.device, forms: Sequence[NormForm], tokens: int
) -> Trial:
    def each_norm(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[str, Sequence[torch.Tensor]]]:
        for index, form in enumerate(forms):
            yield form.name, tensors[3 * index : 3 * index + 3]

    def compute(way: norm.NormWay, *tensors: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for name, (grad, x, weight) in each_norm(tensors):
            y, factors = way.norm(x, weight, _EPS, name)
            results += [y, way.gradient(grad, x, weight, factors, name)]
        return results

    def exact(*tensors: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for name, own in each_norm(tensors):
            grad, x, weight = (each.double() for each in own)
            factors = (x.square().mean(-1, keepdim=True) + _EPS).rsqrt()
            normed = x * factors
            scale = weight + (name == norm.ONE_PLUS)
            along = (grad * scale * normed).mean(-1, keepdim=True)
            results += [normed * scale, factors * (grad * scale - normed * along)]
        return results

    sizes: list[tuple[int, ...]] = []
    for form in forms:
        rows = (tokens, form.width)
        sizes += [rows, rows, (form.width,)]
    return Trial.of(norm.WAYS, compute, *_random(sizes, dtype, device), exact=exact)


def _of_decoding(form: KernelForm, shape: BlockShape, device: torch.device) -> PartTrials:
    """The trials of decoding a matrix of an MLP, or of attention in a model without one."""
    proofs = decoding_trials(form.weights, _matrix(shape), form.torch_dtype, device)
    # A model has one form for nearly all of its weights.
    return _of_triton("decoding", proofs, proofs[1])


def _of_rounding(form: KernelForm, shape: BlockShape, device: torch.device) -> PartTrials:
    """The trials of rounding such a matrix with an update."""
    proofs = rounding_trials(form.weights, _matrix(shape), device)
    return _of_triton("rounding", proofs, proofs[1])


def _matrix(shape: BlockShape) -> tuple[int, int]:
    """The shape of a matrix of an MLP, or of attention in a model without one."""
    return (shape.inner or shape.attended, shape.hidden)


def _loss(dtype: torch.dtype, device: torch.device, vocabulary: int, tokens: int) -> Trial:
    def compute(way: token_loss.Way, *tensors: torch.Tensor) -> list[torch.Tensor]:
        outputs, targets, factors = tensors
        losses = way(
            outputs,
            targets,
            factors,
            token_loss.LogitScale(),
        )
        return [losses, outputs]

    def exact(*tensors: torch.Tensor) -> list[torch.Tensor]:
        outputs, targets, factors = tensors
        logps = outputs.double().log_softmax(1)
        is_learned = targets >= 0
        columns = targets.clamp(min=0)[:, None]
        losses = -logps.gather(1, columns)[:, 0] * is_learned
        hits = torch.zeros_like(logps).scatter_(1, columns, 1.0)
        return [losses, (logps.exp() - hits) * (factors * is_learned)[:, None]]

    [outputs] = _random([(tokens, vocabulary)], dtype, device)
    targets = torch.arange(tokens, device=device) * 7919 % vocabulary
    targets[::5] = -100
    factors = torch.full((tokens,), 1 / tokens, device=device)
    outputs *= 4
    return Trial.of(token_loss.WAYS, compute, outputs, targets, factors, exact=exact)


def _of_attention(form: KernelForm, device: torch.device) -> PartTrials:
    longest = form.lengths[0]
    one = attention_inputs(form.shapes, [longest], form.torch_dtype, device)
    found = attention_ways(one, device)

    def make(lengths: list[int]) -> Trial:
        inputs = attention_inputs(form.shapes, lengths, form.torch_dtype, device)

        def of_all(way: Callable[..., list[torch.Tensor]]) -> list[torch.Tensor]:
            return [result for each in inputs for result in way(each)]

        ways = {name: partial(of_all, way) for name, way in found.ways.items()}
        return Trial(ways, exact=partial(of_all, exact_attention))

    ways = [name for name in found.ways if name != PLAIN]
    long = [min(longest, _LONG_DOCUMENT)] * 2
    return PartTrials(
        "attention",
        ways,
        proofs=[partial(make, lengths) for lengths in (*_DOCUMENTS, long)],
        timed=partial(make, form.lengths),
        apart=[way for way in ways if way == FLASH4],
        missing=found.missing,
    )
