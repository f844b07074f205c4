"""bitsandbytes' NF4 and FP4 in files (bnb_4bit.py says of which tensors a weight consists)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import BitsAndBytesConfig

from fsdp_qlora.model.formats.published import PublishedFormat
from fsdp_qlora.model.formats.settings import EXPERTS_KEY, Settings
from fsdp_qlora.model.quantizers.bnb_4bit import BITSANDBYTES, PACKED_STATE

# Suffixes that bitsandbytes appends to the name of a 4-bit weight, besides the state that marks it.
_SUFFIXES = ("", ".absmax", ".nested_absmax", ".quant_map", ".nested_quant_map")


@dataclass(frozen=True, kw_only=True)
class BitsandbytesFormat(PublishedFormat):
    """NF4 or FP4: layers have the bytes of the files, and are never decoded as they are read."""

    quantizer: ClassVar[str | None] = BITSANDBYTES
    patterns_by_transformers: ClassVar[bool] = True

    quant_type: str
    double_quant: bool

    def layer_options(self) -> Mapping[str, Any]:
        return {"quant_type": self.quant_type, "double_quant": self.double_quant}

    def weights_among(self, names: Iterable[str]) -> set[str]:
        return {name.partition(PACKED_STATE)[0] for name in names if PACKED_STATE in name}

    def is_kept(self, quantizer: str | None, quant_type: str) -> bool:
        return True

    def describe_use(self, *, quant_type: str, double_quant: bool) -> str:
        given = {"quant_type": quant_type, "double_quant": double_quant}
        own = self.layer_options()
        ignored = [
            f"--{name} {str(value).lower()}"
            for name, value in given.items()
            if value not in ("auto", own[name])
        ]
        line = (
            f"The model is quantized already ({self.name}): "
            "its own 4-bit weights are used as they are"
        )
        if ignored:
            return f"{line}, and {' and '.join(ignored)} has no effect."
        return f"{line}."


def read_bitsandbytes(settings: Settings) -> BitsandbytesFormat:
    """The format that a quantization_config of bitsandbytes' 4 bits describes."""
    fields = settings.fields
    # The defaults are those of transformers' BitsAndBytesConfig.
    quant_type = fields.get("bnb_4bit_quant_type", "fp4")
    double_quant = fields.get("bnb_4bit_use_double_quant", False)
    name = f"{quant_type}, double quantization"
    if not double_quant:
        name = f"{quant_type}, no double quantization"
    return BitsandbytesFormat(
        name=name,
        quant_type=quant_type,
        double_quant=double_quant,
        skipped=settings.skipped,
        has_experts=fields.get(EXPERTS_KEY, False),
    )


def bitsandbytes_config(
    plain: Sequence[str], *, quant_type: str, double_quant: bool, has_experts: bool
) -> dict[str, Any]:
    """The quantization_config of a model that is written in this format.

    plain: paths of linear layers that are not quantized.
    """
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=list(plain),
    )
    content: dict[str, Any] = quantization.to_dict()
    if has_experts:
        content[EXPERTS_KEY] = True
    return content


def packed_tensors(names: Iterable[str]) -> set[str]:
    """The names of the tensors that 4-bit weights consist of.

    names: all tensors of a model's files.
    """
    states = {name for name in names if PACKED_STATE in name}
    return states | {
        name.partition(PACKED_STATE)[0] + suffix for name in states for suffix in _SUFFIXES
    }
