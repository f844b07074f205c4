from collections.abc import Callable
from pathlib import Path

import pytest

from tests.phantom import environment
from tests.tiny import flags, make_rows, write_rows


@pytest.mark.parametrize("ranks", [1, 2])
def test_offloaded_weights_stay_on_the_host_and_train_to_an_adapter(
    models: Callable[..., Path], tmp_path: Path, ranks: int
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", make_rows(8))
    options = flags(
        model_name=models("llama"),
        dataset=rows,
        train_type="qlora",
        max_steps=2,
        batch_size=2,
        context_length=256,
        use_cpu_offload=True,
        quant_cache="off",
        log_to="stdout",
        output_dir=tmp_path / "out",
    )
    ended = environment.run(["train.py", *options], tmp_path / "logs", ranks=ranks)
    assert [rank.status for rank in ended] == [0] * ranks, ended[0].output[-3000:]
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
