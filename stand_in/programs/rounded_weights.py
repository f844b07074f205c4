"""Rounds weights with an update on the CPU and on the device; prints the forms that differ."""

import json
from typing import Any

import torch

from fsdp_qlora.model.quantizers.rounded_weight import Update
from tests.helpers.rounded_layers import FORMS, filled

# More than a CPU rounds at a time, and less than a GPU.
SHAPE = (1280, 1024)


def rounded(layer: Any, update: Update) -> list[torch.Tensor]:
    """The bytes of all tensors, on the CPU."""
    layer.store(layer.rounded(update, layer.tensors()))
    parameters = [getattr(layer, name) for name in ("weight", *layer.statistics)]
    return [each.detach().cpu().view(torch.uint8) for each in parameters]


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(SHAPE, generator=generator)
    lora_A = torch.randn(8, SHAPE[1], generator=generator) / 8
    lora_B = torch.randn(SHAPE[0], 8, generator=generator) / 8
    unlike = []
    for form in FORMS:
        found = []
        for device in ("cpu", "cuda"):
            layer = filled(form, values).to(device)
            with torch.no_grad():
                update = Update(lora_A.to(device), lora_B.to(device), 0.5)
                found.append(rounded(layer, update))
        if not all(map(torch.equal, *found)):
            unlike.append(form)
    print(json.dumps({"forms": len(FORMS), "unlike": unlike}))


if __name__ == "__main__":
    main()
