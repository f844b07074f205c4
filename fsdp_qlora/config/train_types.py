"""What each `--train_type` means: one row of three choices."""

from typing import NamedTuple

from fsdp_qlora.errors import UserError


class TrainType(NamedTuple):
    """adapter: kind of adapter. quantizer: how the base is stored. trains: all, adapter or new_blocks."""

    adapter: str | None
    quantizer: str | None
    trains: str

    @property
    def has_adapter(self) -> bool:
        return self.adapter is not None

    @property
    def trains_new_blocks(self) -> bool:
        return self.trains == "new_blocks"

    def check_takes_4bit(self, name: str, model_name: str) -> None:
        """Refuse a train type, called `name`, that needs weights which a 4-bit checkpoint no longer has."""
        if self.quantizer != "bnb_4bit" or self.trains_new_blocks:
            raise UserError(
                f"model_name {model_name} is quantized to 4 bits, which train_type {name} cannot train. "
                "Use --train_type qlora, or give the model with 16- or 32-bit weights."
            )


TRAIN_TYPES: dict[str, TrainType] = {
    "full": TrainType(adapter=None, quantizer=None, trains="all"),
    "lora": TrainType(adapter="lora", quantizer=None, trains="adapter"),
    "qlora": TrainType(adapter="lora", quantizer="bnb_4bit", trains="adapter"),
    "dora": TrainType(adapter="dora", quantizer=None, trains="adapter"),
    "bnb_dora": TrainType(adapter="dora", quantizer="bnb_4bit", trains="adapter"),
    # In 2024 these two were a second implementation of LoRA; here they are only other names.
    "custom_lora": TrainType(adapter="lora", quantizer=None, trains="adapter"),
    "custom_qlora": TrainType(adapter="lora", quantizer="bnb_4bit", trains="adapter"),
    "hqq_lora": TrainType(adapter="lora", quantizer="hqq", trains="adapter"),
    "hqq_dora": TrainType(adapter="dora", quantizer="hqq", trains="adapter"),
    "int8_lora": TrainType(adapter="lora", quantizer="int8", trains="adapter"),
    "bnb_llama_pro": TrainType(adapter=None, quantizer="bnb_4bit", trains="new_blocks"),
    "hqq_llama_pro": TrainType(adapter=None, quantizer="hqq", trains="new_blocks"),
}
