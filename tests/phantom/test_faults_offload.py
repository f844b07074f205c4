from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.phantom import environment
from tests.phantom.test_steps import sizes
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
        sharding_strategy="full_shard",
        recompute="all",
        quant_cache="off",
        log_to="stdout",
        output_dir=tmp_path / "out",
    )
    ended = environment.run(["train.py", *options], tmp_path / "logs", ranks=ranks, summary=True)
    assert [rank.status for rank in ended] == [0] * ranks, ended[0].output[-3000:]
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    if ranks == 2:
        for rank in ended:
            assert_shards_are_copied_for_each_gather(rank.summary, models("llama"))


def assert_shards_are_copied_for_each_gather(counts: dict[str, Any], model: Path) -> None:
    """Each gather of frozen weights begins with a copy of the rank's own, beside the computation; none goes back."""
    embedding, blocks, _, head, norm = (
        sum(size) if isinstance(size, list) else size for size in sizes(model, shards=2)
    )  # of two ranks
    beside, gathers = Counter[str](), Counter[int]()
    for copied in counts["copies"]:
        if copied["stream"]:
            assert copied["pinned"], copied
            beside[copied["kind"]] += copied["bytes"] * copied["count"]
    for gathered in counts["collectives"]:
        if gathered["kind"] == "all_gather":
            gathers[gathered["bytes"]] += gathered["count"]
    block = blocks // 2  # of two of the same size
    assert embedding == head
    # The self-test gathers one block by itself. Of 128 bytes, as the last norm, other tensors are too.
    assert gathers[block] > 8
    # The head is not gathered: its rows on a rank come with each forward pass, two of steps and some of trials.
    rest = beside["host_to_device"] - (gathers[block] - 1) * block // 2
    times, others = divmod(rest, head // 2)
    assert 2 < times < gathers[block] // 2
    assert 0 < others <= gathers[norm] * norm // 2
    assert not beside["device_to_host"]
    # The rest is loaded, checked, printed or saved.
    back = [copied for copied in counts["copies"] if copied["kind"] == "device_to_host"]
    in_steps = [copied for copied in back if copied["line"].startswith(("fsdp_qlora/training", "fsdp_qlora/sharding"))]
    assert sum(copied["bytes"] * copied["count"] for copied in in_steps) < 1024, in_steps
    assert not [copied for copied in back if not copied["line"]]  # of the backward pass
