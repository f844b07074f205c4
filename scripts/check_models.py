"""Compares the sizes of the models that `plan` knows by name with their config.json on the hub.

Models with terms to accept need a token that has (HF_TOKEN). The exit status is 1 if a size
differs, 2 if one cannot be read.

python scripts/check_models.py [TABLE.yaml]
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import hf_hub_download

from fsdp_qlora.planning.known_models import KNOWN_MODELS
from fsdp_qlora.planning.offers.find_model import config_of
from fsdp_qlora.utils.text import first_line

_NO_SIZES = {"hub", "model_type", "pad_token_id", "max_position_embeddings"}
_OF_BLOCKS = {"layer_types", "layers_block_type", "mlp_layer_types", "per_layer_config"}


def differences(sizes: dict[str, Any], keys: set[str]) -> list[str]:
    """A sentence for each key whose value in the model's config.json is not the table's."""
    theirs = json.loads(Path(hf_hub_download(sizes["hub"], "config.json")).read_text())
    ours = config_of(sizes).get_text_config()
    # Read as transformers does: some names of a file are others in the configuration, such as
    # compress_ratios.
    read = type(ours).from_dict(
        {**theirs, **(theirs.get("text_config") or {}), "model_type": ours.model_type}
    )
    pairs = {key: (ours.to_dict().get(key), read.to_dict().get(key)) for key in keys | _OF_BLOCKS}
    return [
        f"{key} is {there} there, and {here} here"
        for key, (here, there) in sorted(pairs.items())
        if here != there
    ]


def main(argv: list[str]) -> int:
    table = yaml.safe_load(Path(argv[0]).read_text()) if argv else KNOWN_MODELS
    models = {name: sizes for name, sizes in table.items() if "model_type" in sizes}
    keys = {key for sizes in models.values() for key in sizes} - _NO_SIZES
    status = 0
    for name, sizes in models.items():
        try:
            found = differences(sizes, keys)
            status = max(status, int(bool(found)))
        # the client's errors of the network and the hub are OSErrors
        except (OSError, ValueError) as error:
            found = [f"cannot be read: {first_line(error)}"]
            status = 2
        print(f"{name} ({sizes['hub']}): {'; '.join(found) or 'as on the hub'}", flush=True)
    others = {name: entry for name, entry in table.items() if name not in models}
    same = {
        name: entry if isinstance(entry, str) else entry["sizes_of"]
        for name, entry in others.items()
    }
    unknown = [name for name, model in same.items() if model not in models]
    if unknown:
        print(f"names of no model: {', '.join(unknown)}")
    return max(status, int(bool(unknown)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
