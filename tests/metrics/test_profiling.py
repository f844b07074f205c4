"""Each rank profiles its own GPU."""

from pathlib import Path
from unittest import mock

from fsdp_qlora.observability.profiling import _write


def test_each_rank_exports_the_memory_timeline_of_its_own_gpu(tmp_path: Path) -> None:
    profiler = mock.Mock(step_num=4)
    profiler.key_averages().table.return_value = "a table"
    _write(tmp_path / "rank1_steps3-4", "cuda:1", True, profiler)
    file = str(tmp_path / "rank1_steps3-4.memory.json.gz")
    assert profiler.export_memory_timeline.call_args == mock.call(file, device="cuda:1")  # torch takes cuda:0 by itself
