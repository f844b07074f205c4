"""A run continues, to the bit, with its weights in host memory or in the GPU's."""

import pytest

from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, run_ranks, train_ok


@pytest.mark.parametrize(
    "options",
    [
        {"train_type": "full"},
        {"train_type": "qlora", "modules_to_save": "embed_tokens,lm_head"},
        {"train_type": "lora"},
    ],
    ids=["full", "modules_to_save", "adapters"],
)
def test_a_run_continues_with_another_offload(models, tmp_path, options):
    options |= {
        "model_name": models(num_hidden_layers=3),
        "dataset": write_rows(tmp_path / "rows.jsonl", make_rows(20)),
        "max_steps": 4,
        "lr": 1e-2,
    }
    one_go = tmp_path / "one_go"
    parts = tmp_path / "parts"
    train_ok(1, one_go, **options)
    for number, offload in enumerate((False, 2, True)):  # each but the last ends after a step
        argv = flags(
            output_dir=parts, log_to="stdout", quant_cache="off", **options, use_cpu_offload=offload
        )
        stop = ["--max_hours", "1e-7"] if number < 2 else []
        [status], output = run_ranks(1, [*argv, *stop], tmp_path / f"logs{number}")
        assert status == (3 if stop else 0), output
    saved = [
        [path.read_bytes() for path in sorted(out.glob("*.safetensors"))] for out in (one_go, parts)
    ]
    assert saved[0] and saved[0] == saved[1]
