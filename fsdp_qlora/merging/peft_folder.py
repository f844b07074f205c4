"""An adapter in PEFT's format, opened to be merged."""

import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from peft import LoraConfig

from fsdp_qlora.adapters.peft_folder import read_config, weights_file
from fsdp_qlora.errors import UserError
from fsdp_qlora.loading.weight_files import WeightFiles


class PeftFolder(NamedTuple):
    """config: without the initial values, which the saved tensors replace. files: tensors by their names."""

    path: Path
    config: LoraConfig
    files: WeightFiles

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor, float32 on the CPU."""
        return self.files.read_rows(name, 0, self.files.shape(name)[0]).float()


def open_adapter(path: Path) -> PeftFolder:
    """Open an adapter's folder; its tensors stay in the file until they are read.

    Raises:
        UserError: as `read_config`, or the tensors are missing, pickled or damaged.
    """
    read_config(path)
    weights = weights_file(path)
    try:
        with warnings.catch_warnings(action="ignore"):
            config = LoraConfig.from_pretrained(str(path))
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise UserError(f"--adapter {path}: its adapter_config.json cannot be used ({error}).") from error
    config.init_lora_weights = True
    config.inference_mode = True
    return PeftFolder(path, config, WeightFiles(path, file=weights.name))
