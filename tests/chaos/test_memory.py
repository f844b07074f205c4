"""The host memory of a rank does not grow from step to step."""

import ctypes
import gc
import os
from pathlib import Path

from tests.helpers.rows import make_rows, write_rows
from tests.helpers.run import flags, on_ranks

# steps
FIRST = 50
LAST = 350


def private_kib() -> int:
    """Memory of this process that is in use: what the allocator keeps for later is given back
    first.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("RssAnon")).split()[1])


def train_and_measure(argv: list[str], folder: Path) -> int:
    import train
    from fsdp_qlora.run.supervision import StepRecorder

    stepped = StepRecorder.stepped
    kib = {}

    def measured(self: StepRecorder, progress, record) -> None:  # type: ignore[no-untyped-def]
        stepped(self, progress, record)
        if progress.step in (FIRST, LAST):
            kib[progress.step] = private_kib()

    StepRecorder.stepped = measured  # type: ignore[method-assign]
    status = train.main(argv)
    (folder / f"{os.environ['RANK']}.grown").write_text(str(kib[LAST] - kib[FIRST]))
    return status


def test_300_steps_leak_less_than_a_mebibyte(tmp_path, models):
    argv = flags(
        model_name=models(num_hidden_layers=1),
        dataset=write_rows(tmp_path / "rows.jsonl", make_rows(100)),
        output_dir=tmp_path / "out",
        quant_cache="off",
        log_to="tqdm",
        max_steps=LAST,
        num_epochs=100,
        batch_size=2,
        lora_target_modules="q_proj",
        lora_rank=2,
    )
    statuses, output = on_ranks(2, train_and_measure, (argv, tmp_path), tmp_path / "logs")
    assert statuses == [0, 0], output[-3000:]
    grown = [int(path.read_text()) for path in tmp_path.glob("*.grown")]
    assert len(grown) == 2 and max(grown) < 1024, f"{grown} KiB"
