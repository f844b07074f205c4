"""The train types of `--train_type`: one row of three choices each."""

from typing import NamedTuple


class TrainType(NamedTuple):
    """The three choices of a train type.

    adapter: kind of adapter. quantizer: how the base is stored; bnb_4bit in the table of train
    types stands for all of QUANT_TYPES. trains: all, adapter or new_blocks.
    """

    adapter: str | None
    quantizer: str | None
    trains: str

    @property
    def trains_new_blocks(self) -> bool:
        return self.trains == "new_blocks"


# Value of --quant_type -> quantizer of the train types that store the base as this option says.
QUANT_TYPES = {
    "auto": "bnb_4bit",
    "nf4": "bnb_4bit",
    "fp4": "bnb_4bit",
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
    "fp8": "fp8",
}

# Quantizer -> the package that it needs beside the program's own.
PACKAGES = {"hqq": "hqq"}

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
