"""Blocks that run as graphs train on rows with images to the same bits as without."""

import pytest

from tests.helpers.rows import write_rows
from tests.parity.test_graphed import assert_trains_to_the_same_bits
from tests.parity.test_images import PROCESSORS, make_chats
from tests.parity.test_multimodal import make_multimodal


@pytest.mark.parametrize("family", ["gemma3", pytest.param("qwen3_vl", marks=pytest.mark.slow)])
def test_graphed_blocks_train_on_images_to_the_same_bits(family, tmp_path):
    folder = make_multimodal(tmp_path / "model", family)
    PROCESSORS[family](folder)
    write_rows(folder / "rows.jsonl", make_chats(folder)[0])
    output = assert_trains_to_the_same_bits(
        tmp_path,
        1,
        model_name=folder,
        dataset=folder / "rows.jsonl",
        train_type="qlora",
        precision="bf16",
        num_epochs=2,
    )
    assert ("Rows are padded" in output) == (family == "gemma3")
