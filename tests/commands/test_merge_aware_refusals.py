"""An adapter of `--merge_aware` is of use merged only: commands that would take it otherwise."""

from pathlib import Path

import pytest

from fsdp_qlora.__main__ import main
from tests.helpers.models import Models
from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import train_ok

RUN = {"merge_aware": True, "lora_rank": 4, "batch_size": 2, "max_steps": 2, "precision": "fp32"}


@pytest.fixture(scope="module")
def folder(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base in NVFP4, rows, and two runs: `aware`, and `plain` without the option."""
    folder = tmp_path_factory.mktemp("runs")
    argv = ["quantize", str(models()), "--out", str(folder / "base"), "--format", "nvfp4"]
    assert main(argv) == 0
    rows = write_rows(folder / "rows.jsonl", make_rows(8))
    for name, is_aware in (("aware", True), ("plain", False)):
        options = RUN | {"merge_aware": is_aware}
        train_ok(1, folder / name, model_name=folder / "base", dataset=rows, **options)
    return folder


REFUSED = {
    "export aware --for vllm --out made": "vLLM would load the adapter beside its base",
    "merge aware --dtype bf16 --out made": "Leave out --base dequantized and --dtype",
    "merge aware --base dequantized --out made": "Leave out --base dequantized and --dtype",
    "serve --model_name base --merge_aware true --folder made": "plain LoRA adapters only",
    "train --adapter plain --merge_aware true --dataset rows.jsonl": "the adapter's is false",
    "train --adapter aware --merge_aware false --dataset rows.jsonl": "the adapter's is true",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_merged_as_it_was_trained_is_refused(words, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert main(words.split()) == 2
    assert REFUSED[words] in " ".join(capsys.readouterr().err.split())
    assert not [*folder.glob("made/**/*.safetensors")]
