"""An adapter's folder in PEFT's format, ours or anybody's: its configuration and its tensors."""

import json
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from peft import LoraConfig

from fsdp_qlora.errors import UserError
from fsdp_qlora.loading.weight_files import WeightFiles

_TENSORS = "adapter_model.safetensors"
# These replace the base when training begins, and PEFT saves an adapter for that other base unless it is told to
# convert it.
_OF_ANOTHER_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")
# Settings with which an adapter is no sum of a weight and a product.
_UNKNOWN = (
    "layer_replication", "lora_bias", "trainable_token_indices", "alora_invocation_tokens", "arrow_config",
    "use_qalora", "velora_config", "kasa_config", "use_bdlora", "megatron_config",
)  # fmt: skip


class PeftFolder(NamedTuple):
    """config: with first values left out, which the saved tensors replace. files: tensors by their names."""

    path: Path
    config: LoraConfig
    files: WeightFiles

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor, float32 on the CPU."""
        return self.files.read_rows(name, 0, self.files.shape(name)[0]).float()


def read_peft_folder(path: Path) -> PeftFolder:
    """Open an adapter's folder; its tensors stay in the file until they are read.

    Raises:
        UserError: it is no LoRA adapter of PEFT's, is pickled or damaged, or was trained on another base than it names.
    """
    config = _read_config(path)
    if not (path / _TENSORS).is_file():
        pickled = " Its adapter_model.bin is pickled, which can run code: save it again as safetensors."
        raise UserError(f"--adapter {path} has no {_TENSORS}.{pickled * (path / 'adapter_model.bin').is_file()}")
    if used := [name for name in _UNKNOWN if getattr(config, name, None)]:
        raise UserError(f"--adapter {path}: {', '.join(used)} of its adapter_config.json is not supported here.")
    init = str(config.init_lora_weights).lower()
    if init.startswith(_OF_ANOTHER_BASE):
        raise UserError(
            f"--adapter {path} was saved for the base that init_lora_weights {init} has made, not for the original "
            "one. Save it with PEFT's path_initial_model_for_weight_conversion."
        )
    config.init_lora_weights = True
    config.inference_mode = True
    return PeftFolder(path, config, WeightFiles(path, file=_TENSORS))


def _read_config(path: Path) -> LoraConfig:
    try:
        content = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
        kind = content.get("peft_type")
        if kind != "LORA":
            raise UserError(f"--adapter {path} is of PEFT's type {kind}. LoRA and DoRA (peft_type LORA) are supported.")
        with warnings.catch_warnings(action="ignore"):
            return LoraConfig.from_pretrained(str(path))
    except FileNotFoundError as error:
        raise UserError(
            f"--adapter {path} has no adapter_config.json, so it is no adapter's folder. Give the output folder of a "
            "run, or one that PEFT saved."
        ) from error
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"--adapter {path}: its adapter_config.json cannot be used ({error}).") from error
