"""Bad input: what each rank says, the exit status, and what is left behind."""

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.models import Models, edit_weights
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, on_ranks
from tests.helpers.tokenizers import make_tokenizer

Tensors = dict[str, torch.Tensor]
NORM = "model.norm.weight"

Damage = Callable[[Path], object]


def _edit_file(file: str, **changes: object) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


def _edit_config(**changes: object) -> Damage:
    return _edit_file("config.json", **changes)


def _write_config(text: str) -> Damage:
    return lambda folder: (folder / "config.json").write_text(text)


def _edit_tensors(edit: Callable[[Tensors], object]) -> Damage:
    return lambda folder: edit_weights(folder, edit)


def _replace_norm(change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return _edit_tensors(lambda tensors: tensors.update({NORM: change(tensors[NORM])}))


def _remove_tokenizer(folder: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _index(norm_file: str, *, drop_norm: bool = False) -> Damage:
    """Add an index that places one tensor in `norm_file`."""

    def damage(folder: Path) -> None:
        names = load_file(folder / "model.safetensors").keys()
        weight_map = {**dict.fromkeys(names, "model.safetensors"), NORM: norm_file}
        if drop_norm:
            _edit_tensors(lambda tensors: tensors.pop(NORM))(folder)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return damage


def _pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


# The folder of a copy of the model -> (what is done to it, words that every rank's message has).
DAMAGES: dict[str, tuple[Damage, list[str]]] = {
    "no_tokenizer": (
        _remove_tokenizer,
        ["model_name no_tokenizer", "no tokenizer", "Put the tokenizer's files (tokenizer.json"],
    ),
    "no_eos": (
        _edit_file("tokenizer_config.json", eos_token=None),
        ["model_name no_eos", "no eos_token", "Set eos_token in tokenizer_config.json"],
    ),
    "broken_config": (
        _write_config('{"model_type": "llama",'),
        ["broken_config/config.json is not valid JSON", "Download"],
    ),
    "unknown_type": (
        _edit_config(model_type="lllama"),
        [
            "unknown_type/config.json",
            "model_type 'lllama'",
            "does not support",
            "pip install --upgrade transformers",
        ],
    ),
    "missing_tensor": (
        _edit_tensors(lambda tensors: tensors.pop(NORM)),
        ["missing_tensor", "config.json", f"missing: {NORM} [64]", "Download"],
    ),
    "other_name": (
        _edit_tensors(lambda tensors: tensors.update({"model.extra.weight": tensors.pop(NORM)})),
        [
            "other_name",
            f"missing: {NORM}",
            "not in this architecture: model.extra.weight (in model.safetensors)",
        ],
    ),
    "wrong_shape": (
        _replace_norm(lambda norm: norm[:63].clone()),
        ["wrong_shape", f"wrong shape: {NORM} in model.safetensors is [63], the model's is [64]"],
    ),
    "integers": (
        _replace_norm(lambda norm: norm.int()),
        [
            "integers",
            f"wrong type: {NORM} in model.safetensors is int32",
            "and weights must be 16- or 32-bit floats",
        ],
    ),
    "truncated": (
        _truncate,
        ["truncated/model.safetensors is not a readable safetensors file", "Download it again"],
    ),
    "absent_file": (
        _index("model-00002-of-00002.safetensors"),
        [
            "absent_file/model.safetensors.index.json",
            "names missing files: model-00002-of-00002.safe",
            "Download",
        ],
    ),
    "outside": (
        _index("../model/model.safetensors"),
        [
            "outside/model.safetensors.index.json names '../model/model.safetensors'",
            "not a file of its folder",
        ],
    ),
    "absent_tensor": (
        _index("model.safetensors", drop_norm=True),
        ["absent_tensor/model.safetensors", f"tensor {NORM}", "Download"],
    ),
    "pickled": (
        _pickle,
        ["pickled has no .safetensors file", "pytorch_model.bin", "save_pretrained"],
    ),
    "list_config": (_write_config("[1, 2]"), ["list_config/config.json"]),
    "nested_config": (_write_config("[" * 100_000), ["nested_config/config.json is not valid"]),
    "layers": (
        _edit_config(num_hidden_layers=2**31),
        ["num_hidden_layers 2147483648, and at most 1000"],
    ),
    "many_heads": (
        _edit_config(num_key_value_heads=10**12),
        ["has weights of size 1024000000000000", "k_proj", "Download"],
    ),
    "wide": (
        _edit_config(intermediate_size=10**12),
        ["has weights of size 64000000000000", "gate_proj", "Download"],
    ),
    "activation": (
        _edit_config(hidden_act="nope"),
        ["described by config.json cannot be built: 'nope'"],
    ),
    "text_size": (
        _edit_config(intermediate_size="128"),
        [
            "model_name text_size: its config.json cannot be used",
            "'intermediate_size' expected int, got str",
        ],
    ),
    "heads": (
        _edit_config(num_attention_heads=4, num_key_value_heads=3),
        [
            "wrong shape: model.layers.0.self_attn.k_proj.weight in model.safetensors is [32, 64], "
            "the model's is [48"
        ],
    ),
}
# What is wrong -> (options besides the good ones, words that every rank's message has).
BAD_INPUT: dict[str, tuple[dict[str, object], list[str]]] = {
    **{folder: ({"model_name": folder}, words) for folder, (_, words) in DAMAGES.items()},
    "several at once": (
        {"context_length": 0, "batch_size": 0, "dataset_samples": 0, "seed": -1},
        [
            "4 options are wrong",
            "--context_length must be 2 or more, but is 0",
            "--batch_size must be 1 or more",
        ],
    ),
    "hub model without a network": (
        {"model_name": "owner/model"},
        ["model_name owner/model", "no such local folder", "out of reach", "path of its folder"],
    ),
    "folder without config.json": ({"model_name": "data"}, ["model_name data", "no config.json"]),
    "encoder-decoder model": (
        {"model_name": "t5"},
        ["model_name t5", "'t5'", "not a decoder-only", "llama"],
    ),
    "model without a record of new blocks": (
        {"train_type": "bnb_llama_pro"},
        ["does not list the added blocks"],
    ),
    "target modules that match nothing": (
        {"lora_target_modules": "q_proj,query"},
        ["lora_target_modules", "is named query", "k_proj", "q_proj", "up_proj"],
    ),
    "hub dataset without a network": (
        {"dataset": "owner/rows"},
        ["dataset owner/rows", "no such file or folder", "out of reach", "alpaca_demo"],
    ),
    "malformed JSON line": (
        {"dataset": "data/malformed.jsonl"},
        ["data/malformed.jsonl:3:", "(column ", "one JSON object"],
    ),
    "empty held-out dataset": (
        {"eval_dataset": "data/empty.jsonl"},
        ["data/empty.jsonl", "the dataset is empty"],
    ),
    "output_dir of another run": (
        {"output_dir": "other_run"},
        ["output_dir other_run is not empty", "another folder", "--resume auto:replace"],
    ),
    "output_dir below a file": (
        {"output_dir": "data/good.jsonl/out"},
        ["output_dir data/good.jsonl/out", "is a file", "another"],
    ),
}


# Each kind of it once on two ranks; the others are decided alike before ranks meet, or by the same
# code.
ON_TWO_RANKS = {
    "several at once",
    "hub model without a network",
    "missing_tensor",
    "truncated",
    "malformed JSON line",
    "output_dir of another run",
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_every_rank_says_what_is_wrong_and_nothing_is_left(case, inputs, tmp_path):
    options, words = BAD_INPUT[case]
    argv = flags(
        **{"model_name": "model", "dataset": "data/good.jsonl", "output_dir": "output", **options}
    )
    before = snapshot(inputs)
    ranks = 2 if case in ON_TWO_RANKS else 1
    statuses, output = on_ranks(ranks, train_offline, (inputs, argv), tmp_path)
    assert statuses == [2] * ranks, output
    for rank in range(ranks):
        own = (tmp_path / f"rank{rank}.log").read_text()
        _, found, message = own.partition(f"[rank {rank}] error: " if ranks > 1 else "error: ")
        assert found and not [word for word in words if word not in message], own
        # once, and not a screenful
        assert message.count("error: ") == 0 and len(message) < 1500, own
        assert "Traceback" not in own
        assert own.count("[no network]") <= 2  # nothing is tried again and again
    assert snapshot(inputs) == before


def train_offline(folder: Path, argv: list[str]) -> int:
    """train.py's main, started in `folder`, on a machine that can resolve no other
    machine's name.
    """
    import train

    os.chdir(folder)
    resolve = socket.getaddrinfo

    def resolve_this_machine(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in ("localhost", "127.0.0.1", None):
            print("[no network]")
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *args, **kwargs)

    socket.getaddrinfo = resolve_this_machine
    return train.main(argv)


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of everything in a folder."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


# ---- the inputs
# -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a good model, datasets and another run, and a copy of the model per damage."""
    folder = tmp_path_factory.mktemp("inputs")
    shutil.copytree(models(), folder / "model")
    for name, (damage, _) in DAMAGES.items():
        shutil.copytree(models(), folder / name)
        damage(folder / name)
    (folder / "t5").mkdir()
    (folder / "t5" / "config.json").write_text(
        json.dumps({"model_type": "t5", "architectures": ["T5Model"]})
    )
    make_tokenizer(folder / "t5")
    _write_datasets(folder / "data")
    (folder / "other_run").mkdir()
    (folder / "other_run" / "adapter_config.json").write_text("{}")
    # the first start pays for the imports
    on_ranks(1, train_offline, (folder, ["--help"]), folder / "logs")
    return folder


def _write_datasets(folder: Path) -> None:
    folder.mkdir()
    write_rows(folder / "good.jsonl", make_rows(8))
    good, *more = (json.dumps(row) for row in make_rows(3))
    (folder / "malformed.jsonl").write_text("\n".join([good, *more[:1], good[:-1], good]))
    (folder / "empty.jsonl").write_text("")
