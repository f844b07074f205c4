"""A training request whose bits are flipped is read or refused, without an error of another kind or
much memory.
"""

import random
import tracemalloc

import pytest

from fsdp_qlora.service.messages import Limits
from fsdp_qlora.service.train_request import TrainRequest, parse_train_request
from fsdp_qlora.utils.errors import UserError
from tests.helpers.fresh_process import in_fresh_process
from tests.service.harness import VOCABULARY, datums, training_message

pytestmark = pytest.mark.quick
LIMITS = Limits(
    vocabulary=VOCABULARY, context_length=128, tokens_at_once=512, targets_at_once=65_536
)


def read_flipped(likely: int) -> tuple[int, int, int]:
    """Read 1,500 damaged requests: how many are read, how many refused, and the most bytes that
    Python allocated.
    """
    choose = random.Random(likely)
    whole = training_message("model", 1, datums(3, 1, likely=likely)).SerializeToString()
    assert len(TrainRequest.read(parse_train_request(whole), LIMITS).table) == 3
    read = 0
    refused = 0
    tracemalloc.start()
    for _ in range(1500):
        body = bytearray(whole)
        for _ in range(choose.choice([1, 1, 2, 5, 40])):
            body[choose.randrange(len(body))] ^= 1 << choose.randrange(8)
        try:
            TrainRequest.read(parse_train_request(bytes(body)), LIMITS)
            read += 1
        except UserError as refusal:
            refused += 1
            assert str(refusal) and len(str(refusal)) < 1000
    _, most = tracemalloc.get_traced_memory()
    return read, refused, most


@pytest.mark.parametrize("likely", [0, 3], ids=["one_target", "several"])
def test_flipped_bits_are_read_or_refused(likely):
    read, refused, most = in_fresh_process(read_flipped, likely)
    assert min(read, refused) > 100  # both are tried
    assert most < 16 * 2**20
