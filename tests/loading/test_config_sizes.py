"""A config.json that makes no model is refused in one sentence, before anything is built from it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fsdp_qlora.errors import UserError
from fsdp_qlora.models import build_meta_model, load_config

DEEP = 100_000


def change(**values: object) -> Callable[[str], str]:
    return lambda text: json.dumps({**json.loads(text), **values})


# What is wrong -> (the content from the good one, what the sentence says).
WRONG = {
    "no blocks": (change(num_hidden_layers=0), "'num_hidden_layers' is 0"),
    "a million blocks": (change(num_hidden_layers=10**6), "'num_hidden_layers' is 1000000"),
    "no width": (change(hidden_size=0), "'hidden_size' is 0"),
    "more blocks than numbers have digits for": (change(num_hidden_layers=10**40), "a number of 133 bits"),
    "a huge vocabulary": (change(vocab_size=10**40), "a number of 133 bits"),
    "no heads": (change(num_attention_heads=0), "'num_attention_heads' is 0"),
    "a huge head": (change(head_dim=10**12), "'head_dim' is 1000000000000"),
    "no head": (change(head_dim=0), "'head_dim' is 0"),
    "a huge number in a nested object": (change(text_config={"n_layer": 10**9}), "'n_layer' is 1000000000"),
    "a huge number of no known name": (change(anything=10**40), "'anything' is a number of 133 bits"),
    "padding outside": (change(pad_token_id=-400), "pad_token_id is -400"),
    "unreadable nesting": (lambda _: "[" * DEEP, "not valid JSON"),
    "deep nesting": (lambda text: text.replace("{", '{"a": ' + "[" * 900 + "]" * 900 + ",", 1), "nested too deeply"),
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
    with pytest.raises(UserError) as error:
        build(load_config(path.parent, "m"))
    assert words in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 600


def build(config: object) -> None:
    kind = torch.float32
    device = torch.device("cpu")
    build_meta_model(config, attn_implementation="auto", dtype=kind, compute_dtype=kind, device=device)  # type: ignore[arg-type]
