"""The base class of formats in which models are published with quantized weights.

A family of formats is a file beside this one, with a subclass of PublishedFormat: the names of a
weight's tensors, whether they fit together, and how they are decoded and encoded.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from fsdp_qlora.model.formats.patterns import matching
from fsdp_qlora.model.formats.stored_tensors import (
    ADVICE,
    DecodedTensor,
    Float32Tensor,
    Part,
    StoredWeight,
)
from fsdp_qlora.model.quantizers.bnb_4bit import BITSANDBYTES
from fsdp_qlora.utils.errors import UserError

# Endings of tensors that no family uses: scales of 8-bit activations, which have 16 bits here.
UNUSED: dict[str, str | None] = dict.fromkeys(
    (
        ".input_scale",
        ".activation_scale",
        ".input_global_scale",
        ".k_scale",
        ".v_scale",
        ".q_scale",
        ".kv_scale",
    )
)
COMPRESSED: dict[str, str | None] = UNUSED | {
    ".weight_shape": None,
    ".input_zero_point": None,
    "_packed": "",
    "_global_scale": ".global_scale",
    "_scale": ".scale",
}
"""Endings of compressed-tensors' packed weights, and their names here."""


class Unreadable(Exception):
    """A format that cannot be read, and why."""


@dataclass(frozen=True, kw_only=True)
class PublishedFormat:
    """The format of a model's weight files, from its quantization_config.

    Files tell which weights are quantized (`scaled`). Without files the four fields below it do.
    """

    quantizer: ClassVar[str | None] = None
    """The row of QUANTIZERS that trains on the codes as they are; None: they are only decoded."""
    decoded_type: ClassVar[str] = "bf16"
    """The type of decoded weights, for people."""
    patterns_by_transformers: ClassVar[bool] = False
    """Whether patterns of modules are regular expressions, as transformers matches them."""

    name: str
    """For people."""
    endings: Mapping[str, str | None] = field(default_factory=dict)
    """Ending of a tensor's name in the files -> its ending here, where a weight's statistics are
    named below it; None if the tensor is unused. The first one that fits counts, so that a longer
    ending stands before one that it ends with."""
    scaled: Collection[str] | None = None
    """Names here of the weights that are quantized; None if there are no files yet."""
    skipped: Sequence[str] = ()
    """Patterns of modules that are not quantized."""
    targets: Sequence[str] = ("Linear",)
    """Patterns of modules that are quantized; "Linear" is all."""
    has_linears: bool = True
    """Whether linear layers are quantized."""
    has_experts: bool = True
    """Whether expert parameters are quantized."""

    # ---- what a family defines ----

    def layer_options(self) -> Mapping[str, Any] | None:
        """Arguments of the quantizer's layers; None if only the files' tensors tell them."""
        return None

    @property
    def is_written(self) -> bool:
        """Whether weights can be rounded to the format."""
        return False

    def problem(self, weight: StoredWeight) -> str:
        """Say which of a weight's tensors the format does not have; empty if it has all."""
        raise NotImplementedError

    def decode(self, weight: StoredWeight) -> DecodedTensor:
        """The weight, decoded as it is read, of tensors without a problem."""
        raise NotImplementedError

    def check_kept(self, weight: StoredWeight) -> None:
        """Raise UserError for a weight whose codes the quantizer's layers cannot have."""
        self.check(weight)

    def keep_statistic(self, statistic: Part) -> Float32Tensor | None:
        """A statistic as the quantizer's layers have it; None if that is as it is stored."""
        return None

    def check_without_scale(self, name: str, part: Part) -> None:
        """Raise UserError for a tensor without a scale that must have one to be decoded."""

    # ---- what a model in several formats defines ----

    @property
    def formats(self) -> Sequence["PublishedFormat"]:
        """The formats of the model's groups of layers; this one alone if all have it."""
        return (self,)

    def formats_of(self, names: Iterable[str]) -> Mapping[str, "PublishedFormat"]:
        """Weight or module -> its format, one of `formats`.

        Raises UserError for a name that has none.
        """
        return dict.fromkeys(names, self)

    def in_files(self, names: Iterable[str]) -> Self:
        """The format with the weights that are quantized among the tensors of files."""
        return replace(self, scaled=self.weights_among(names))

    # ---- the same for all families ----

    def check(self, weight: StoredWeight) -> None:
        """Raise UserError for a weight with a `problem`."""
        problem = self.problem(weight)
        if problem:
            raise UserError(
                f"{weight.folder}: {weight.name} is not in {self.name}: {problem}. {ADVICE}"
            )

    def unfitting_scales(self, weight: StoredWeight) -> str:
        """Say that a weight's scales do not fit the shape of its codes."""
        return (
            f"{weight.codes.source} {list(weight.codes.shape)} in {self.name} has scales "
            f"{list(weight.scale.shape)}, which do not fit its shape"
        )

    def chosen(self, linears: Sequence[str], experts: Sequence[str]) -> tuple[list[str], list[str]]:
        """The linear layers and expert parameters that the configuration says to be quantized.

        They are in decoder blocks.

        Raises UserError for patterns that cannot be used.
        """
        paths = list[str]()
        if self.has_linears:
            paths += linears
        if self.has_experts:
            paths += experts
        skipped = matching(paths, self.skipped, by_transformers=self.patterns_by_transformers)
        # "Linear" is a class, which all these modules have.
        targeted = paths if "Linear" in self.targets else matching(paths, self.targets)
        chosen = {*targeted} - skipped
        # In the order of the arguments: the order of a set may differ between ranks.
        chosen_linears = [path for path in linears if path in chosen]
        return chosen_linears, [path for path in experts if path in chosen]

    def name_here(self, name: str) -> str | None:
        """The name that a tensor of the files has here; None for one that is unused."""
        for ending, ending_here in self.endings.items():
            if name.endswith(ending):
                return None if ending_here is None else name.removesuffix(ending) + ending_here
        # A tensor that is not quantized, such as a norm, has one name in both places.
        return name

    def weights_among(self, names: Iterable[str]) -> set[str]:
        """The names here of the weights that are quantized.

        names: of all tensors in the files.
        """
        here = {self.name_here(name) for name in names}
        # A quantized weight has a scale. Other tensors that end so have no weight of their name.
        with_scale = {
            name.removesuffix(".scale") for name in here if name and name.endswith(".scale")
        }
        return with_scale & here

    def is_kept(self, quantizer: str | None, quant_type: str) -> bool:
        """Whether a run trains the weights as they are, and does not decode them as they are read.

        quantizer: of the run's train type. quant_type: the run's.
        """
        is_trained = self.quantizer is not None and self.layer_options() is not None
        # --quant_type nf4 asks for other codes; train types with another quantizer need theirs.
        is_asked = quantizer == BITSANDBYTES and quant_type == "auto"
        return is_asked and is_trained and self.scaled != set()

    def describe_decoding(self, *, quantizes: bool) -> str:
        """Describe in one line that the weights are decoded."""
        if self.scaled == set():
            return (
                f"config.json says that the model is stored in {self.name}, but none of its "
                "weights is."
            )
        use = "and quantized again" if quantizes else "and kept in the precision of this run"
        return (
            f"The model is stored in {self.name}: its weights are decoded to {self.decoded_type} "
            f"as they are read, {use}."
        )

    def describe_use(self, *, quant_type: str, double_quant: bool) -> str:
        """Describe in one line that the model's own weights are used.

        The line has the options that they override.
        """
        return (
            f"The model is stored in {self.name}: its weights are trained on as they are. "
            "--quant_type nf4 quantizes them again."
        )
