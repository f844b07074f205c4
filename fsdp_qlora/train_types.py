"""What each `--train_type` means: one row of three choices."""

from typing import NamedTuple


class TrainType(NamedTuple):
    """adapter: what is added to the base. quantizer: how the base is stored. trains: what learns."""

    adapter: str | None
    quantizer: str | None
    trains: str

    @property
    def has_adapter(self) -> bool:
        return self.adapter is not None


TRAIN_TYPES: dict[str, TrainType] = {
    "full": TrainType(adapter=None, quantizer=None, trains="all"),
    "lora": TrainType(adapter="lora", quantizer=None, trains="adapter"),
    "qlora": TrainType(adapter="lora", quantizer="bnb_4bit", trains="adapter"),
    # In 2024 these two were a second implementation of LoRA; here there is one, and they are its other names.
    "custom_lora": TrainType(adapter="lora", quantizer=None, trains="adapter"),
    "custom_qlora": TrainType(adapter="lora", quantizer="bnb_4bit", trains="adapter"),
}
