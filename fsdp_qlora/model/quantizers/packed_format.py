"""The format of weight files that are quantized already.

A row of QUANTIZERS trains on them as they are, or they are integers.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from fsdp_qlora.model.quantizers.bnb_4bit import PACKED_STATE
from fsdp_qlora.model.quantizers.patterns import matching

# Formats by `PackedFormat.quantizer`: the row of QUANTIZERS, and integers, which have none.
BITSANDBYTES = "bnb_4bit"
INTEGERS = "integers"
# Those that GPTQ's programs write; 3 bits cross the borders of 32-bit words.
GPTQ_BITS = (2, 3, 4, 8)


class PackedFormat(NamedTuple):
    """The format of a model's weight files, from its quantization_config.

    Files tell which weights are quantized (`scaled`). Without files the four fields below it do.
    """

    name: str
    """For people."""
    quantizer: str
    """The format's row of QUANTIZERS, or INTEGERS, which are only decoded."""
    options: Mapping[str, Any] | None
    """Arguments of its layers (or of the tensors that are decoded); None if only the files' tensors
    tell them."""
    endings: Mapping[str, str | None] = MappingProxyType({})
    """Ending of a tensor's name in the files -> its ending here, where a weight's statistics are
    named below it; None if the tensor is unused."""
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
        skipped = matching(paths, self.skipped, by_transformers=self.quantizer == BITSANDBYTES)
        # "Linear" is a class, which all these modules have.
        targeted = paths if "Linear" in self.targets else matching(paths, self.targets)
        chosen = {*targeted} - skipped
        # In the order of the arguments: the order of a set may differ between ranks.
        chosen_linears = [path for path in linears if path in chosen]
        return chosen_linears, [path for path in experts if path in chosen]

    def weights_among(self, names: Collection[str]) -> set[str]:
        """The names here of the weights that are quantized.

        names: of all tensors in the files.
        """
        if self.quantizer == BITSANDBYTES:
            return {name.partition(PACKED_STATE)[0] for name in names if PACKED_STATE in name}
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
        is_trained = (
            self.quantizer != INTEGERS and self.options is not None and self.scaled != set()
        )
        if self.quantizer == BITSANDBYTES:
            return True
        # --quant_type nf4 asks for other codes; train types with another quantizer need theirs.
        return quantizer == BITSANDBYTES and quant_type == "auto" and is_trained

    def name_here(self, name: str) -> str | None:
        """The name that a tensor of the files has here; None for one that is unused."""
        for ending, ending_here in self.endings.items():
            if name.endswith(ending):
                return None if ending_here is None else name.removesuffix(ending) + ending_here
        # A tensor that is not quantized, such as a norm, has one name in both places.
        return name

    def describe_decoding(self, *, quantizes: bool) -> str:
        """Describe in one line that the weights are decoded."""
        if self.scaled == set():
            return (
                f"config.json says that the model is stored in {self.name}, but none of its "
                "weights is."
            )
        use = "and quantized again" if quantizes else "and kept in the precision of this run"
        to = "the type of their scales" if self.quantizer == INTEGERS else "bf16"
        return (
            f"The model is stored in {self.name}: its weights are decoded to {to} as they are "
            f"read, {use}."
        )

    def describe_use(self, *, quant_type: str, double_quant: bool) -> str:
        """Describe in one line that the model's own weights are used.

        The line has the options that they override.
        """
        if self.quantizer != BITSANDBYTES or self.options is None:
            return (
                f"The model is stored in {self.name}: its weights are trained on as they are. "
                "--quant_type nf4 quantizes them again."
            )
        given = {"quant_type": quant_type, "double_quant": double_quant}
        ignored = [
            f"--{name} {str(value).lower()}"
            for name, value in given.items()
            if value not in ("auto", self.options[name])
        ]
        line = (
            f"The model is quantized already ({self.name}): "
            "its own 4-bit weights are used as they are"
        )
        if ignored:
            return f"{line}, and {' and '.join(ignored)} has no effect."
        return f"{line}."
