"""A config.json that makes no model is refused in one sentence, before anything is built from it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fsdp_qlora.errors import UserError
from fsdp_qlora.model.models import build_meta_model, load_config


def change(**values: object) -> Callable[[str], str]:
    return lambda text: json.dumps({**json.loads(text), **values})


# What is wrong -> (the content from the good one, what the sentence says).
WRONG = {
    "a negative width": (change(hidden_size=-64), ""),
    "a huge vocabulary": (change(vocab_size=10**40), ""),
    "a huge number of layers": (change(num_hidden_layers=2**31), "num_hidden_layers 2147483648, more than the 1000"),
    "no heads": (change(num_attention_heads=0), ""),
    "padding outside": (change(pad_token_id=-400), ""),
    "unreadable nesting": (lambda _: "[" * 100_000, "not valid JSON"),
    "an unknown activation": (change(hidden_act="nope"), "cannot be built: 'nope'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_config_that_makes_no_model_is_refused_before_anything_is_built(
    case: str, models: Callable[..., Path], tmp_path: Path
) -> None:
    damage, words = WRONG[case]
    shutil.copytree(models(), tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(damage(path.read_text()))
    kind, device = torch.float32, torch.device("cpu")
    with pytest.raises(UserError) as error:
        config = load_config(path.parent, "m")
        build_meta_model(config, attn_implementation="auto", dtype=kind, compute_dtype=kind, device=device)
    assert words in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 600
