"""An adapter that is damaged or does not fit is refused by name, alike by every command that takes
one.
"""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from tests.commands.test_merge import make_adapter
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, on_ranks, run_ranks

FACTOR = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"  # [4, 64]
OTHER = "base_model.model.lm_head.lora_A.weight"
COMMANDS = ("train", "generate", "merge")


class Damage(NamedTuple):
    """What is said of an adapter with these tensors (None removes one) and this configuration; cut
    without any.

    by: the commands that look at it.
    """

    says: str
    tensors: Mapping[str, torch.Tensor | None] = {}
    config: Mapping[str, Any] = {}
    by: tuple[str, ...] = COMMANDS

    def do(self, folder: Path) -> None:
        weights = folder / "adapter_model.safetensors"
        config = folder / "adapter_config.json"
        tensors = {
            name: tensor
            for name, tensor in (load_file(weights) | self.tensors).items()
            if tensor is not None
        }
        save_file(tensors, weights)
        config.write_text(json.dumps(json.loads(config.read_text()) | self.config))
        if not self.tensors and not self.config:
            weights.write_bytes(weights.read_bytes()[:-100])


DAMAGES = {
    "cut": Damage("adapter_model.safetensors is damaged"),
    "missing": Damage(f"it lacks {FACTOR}", {FACTOR: None}),
    "extra": Damage(f"this model's adapter has no {OTHER}", {OTHER: torch.zeros(4, 64)}),
    "shape": Damage(f"{FACTOR} is [4, 63] and must be [4, 64]", {FACTOR: torch.zeros(4, 63)}),
    # `train` and `generate` find it when they load, on every rank: below.
    "not finite": Damage(
        "has values that are not finite", {FACTOR: torch.full([4, 64], math.inf)}, by=COMMANDS[2:]
    ),
    "alpha": Damage("has nan for lora_alpha", config={"lora_alpha": math.nan}),
    "rank": Damage("has 0 for q_proj", config={"rank_pattern": {"q_proj": 0}}),
    "pissa": Damage("was made with init_lora_weights pissa", config={"init_lora_weights": "pissa"}),
    "targets": Damage(
        "no linear layer of the decoder blocks is named w1",
        {},
        {"target_modules": ["w1"]},
        ("train",),
    ),
    "bias": Damage("has bias 'all', which cannot be trained here", {}, {"bias": "all"}, ("train",)),
    "other base": Damage(
        "was trained on owner/other, and --model_name is owner/this. If the weights are the same",
        config={"base_model_name_or_path": "owner/other"},
        by=("train",),
    ),
}


def run_all(argvs: list[list[str]]) -> int:
    """Run commands one after the other, each after a line with its number and before its exit
    status.
    """
    from fsdp_qlora.__main__ import main

    for number, argv in enumerate(argvs):
        print(f"\nCOMMAND {number}", flush=True)
        print(f"STATUS {main(argv)}", flush=True)
    return 0


def test_a_damaged_adapter_is_refused_by_name_by_every_command(models, tmp_path):
    # as in the hub's cache
    base = tmp_path / "models--owner--this" / "snapshots" / "0"
    out = tmp_path / "out"
    shutil.copytree(models(), base)
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(4))
    good = make_adapter(base, tmp_path / "good", target_modules=["q_proj", "up_proj"])
    words = {
        "train": flags(model_name=base, dataset=rows, output_dir=out),
        "generate": flags(model_name=base, prompt="a"),
        "merge": flags(model_name=base, out=out),
    }
    for name, damage in DAMAGES.items():
        damage.do(shutil.copytree(good, tmp_path / name))
    cases = [(name, command) for name, damage in DAMAGES.items() for command in damage.by]
    argvs = [[command, *flags(adapter=tmp_path / name), *words[command]] for name, command in cases]
    _, output = on_ranks(1, run_all, (argvs,), tmp_path / "logs")
    said = dict(zip(cases, output.split("\nCOMMAND ")[1:], strict=True))
    wrong = [
        case
        for case in cases
        if DAMAGES[case[0]].says not in said[case] or "STATUS 2" not in said[case]
    ]
    assert not wrong, "\n".join(said[case] for case in wrong)
    not_finite = [*flags(adapter=tmp_path / "not finite"), *words["train"]]
    statuses, output = run_ranks(2, not_finite, tmp_path / "logs")
    assert (
        statuses == [2, 2] and ("q_proj.lora_A.weight has values that are not finite") in output
    ), output[-3000:]
    assert not out.exists()
