"""`evaluate` measures what transformers and PEFT compute in one process."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoTokenizer

from fsdp_qlora.cli.main import main
from tests.reference import batch_loss, encode, load_base, load_decoded_base, peft_model
from tests.tiny import flags, make_rows, on_ranks, write_rows

Models = Callable[..., Path]
SETS = {"first": make_rows(7), "second": make_rows(4, seed=5)}


def measured(ranks: int, logs: Path, *words: str, **options: object) -> dict[str, Any]:
    """The JSON that the command prints on so many ranks."""
    argv = ["evaluate", *words, "--json", *flags(quant_cache="off", batch_size=3, precision="fp32", **options)]
    statuses, output = on_ranks(ranks, main, (argv,), logs)
    assert statuses == [0] * ranks, output[-6000:]
    printed = (logs / "rank0.log").read_text()
    found: dict[str, Any] = json.JSONDecoder().raw_decode(printed, printed.index("{\n"))[0]
    return found


@pytest.fixture(scope="module")
def adapter(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of PEFT that changes its base's answers."""
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(1)
    peft_model(load_base(models(), four_bit=False), r=4, init_lora_weights=False).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["base", "adapter", "merged"])
def test_losses_are_those_of_transformers_and_peft_on_any_ranks(
    kind: str, models: Models, adapter: Path, tmp_path: Path
) -> None:
    options: dict[str, object] = {"model_name": models(), "train_type": "lora"}
    model = load_base(models(), four_bit=False)
    if kind == "adapter":
        options = {"adapter": adapter, "train_type": "qlora"}
        model = PeftModel.from_pretrained(load_decoded_base(models()), adapter)
    elif kind == "merged":
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
        model.save_pretrained(tmp_path / "merged")
        AutoTokenizer.from_pretrained(models()).save_pretrained(tmp_path / "merged")
        options = {"adapter": tmp_path / "merged"}
    files = {name: write_rows(tmp_path / f"{name}.jsonl", rows) for name, rows in SETS.items()}
    for ranks in (1,) if kind == "merged" else (1, 2):
        words = ["--dataset", str(files["first"]), f"other={files['second']}"]
        found = measured(ranks, tmp_path / str(ranks), *words, **options)
        for (name, result), rows in zip(found.items(), SETS.values(), strict=True):
            batch = encode(models(), rows)
            expected = batch_loss(model, batch).item()
            assert result["loss"] == pytest.approx(expected, abs=1e-5), (name, ranks)
            assert result["perplexity"] == pytest.approx(math.exp(result["loss"]), rel=1e-12)
            targets = sum(int((labels[:, 1:] != -100).sum()) for _, labels in batch)
            assert (result["rows"], result["num_target_tokens"]) == (len(rows), targets)
        assert list(found) == ["first", "other"] and found["first"]["loss"] != found["other"]["loss"]


def test_rows_that_are_not_there_are_refused_before_weights_are_read(
    models: Models, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (base := tmp_path / "base").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):  # a model without weights
        (base / name).write_bytes((models() / name).read_bytes())
    assert main(["evaluate", *flags(model_name=base, dataset=tmp_path / "none.jsonl", nproc_per_node=1)]) == 2
    assert "none.jsonl" in capsys.readouterr().err
