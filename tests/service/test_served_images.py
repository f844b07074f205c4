"""Images of a service: the same ones on all ranks, and few at a time where many requests wait."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.text.image_processor import ImageProcessor
from fsdp_qlora.distributed.process_group import start_process_group, stop_process_group
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.planning.machine import Machine
from fsdp_qlora.planning.plan import plan_model
from fsdp_qlora.service.sampling import SampleRequest
from fsdp_qlora.service.sent_images import SentImage, SequenceImages, SequenceReader
from fsdp_qlora.service.served_images import ServedImages
from fsdp_qlora.service.waiting_samples import WaitingSamples
from fsdp_qlora.utils.errors import UserError
from tests.helpers.run import on_ranks
from tests.service.image_data import make_image_model, picture, png

CPU = torch.device("cpu")


def _serve_without_pillow_on_rank_1(folder: Path) -> int:
    rank = int(os.environ["RANK"])
    ranks = Ranks(rank, rank, 2, 2, CPU)
    start_process_group(ranks)
    config = TrainConfig(model_name=str(folder), train_type="lora", precision="fp32")
    plan = plan_model(config, Machine.of(config, ranks), None)
    for lacks in (False, True):
        raises = mock.PropertyMock(side_effect=UserError("Images need Pillow."))
        patched = mock.patch.object(ImageProcessor, "_processor", raises)
        if lacks and rank:
            patched.start()
        served = ServedImages(config, plan)
        assert (served.base.processor is None) == lacks
        with served.trial() as rows:
            assert len(rows.train) == (0 if lacks else 2)
    with pytest.raises(UserError, match="has an image, and images are not served: Images need"):
        SequenceReader(served.base, 99).read([SentImage(png(picture(30, 20, 1)), None)], "Datum 1")
    stop_process_group()
    return 0


def test_ranks_serve_no_images_where_one_of_them_lacks_pillow(tmp_path):
    (tmp_path / "model").mkdir()
    model = make_image_model(tmp_path / "model")
    statuses, output = on_ranks(2, _serve_without_pillow_on_rank_1, (model,), tmp_path / "logs")
    assert statuses == [0, 0], output


@pytest.mark.quick
@pytest.mark.parametrize("is_readable", [True, False])
def test_few_images_are_unpacked_for_requests_that_are_answered_together(is_readable):
    looked_at = []
    # Of 16 megapixels in few bytes.
    images = SequenceImages(["a"], 9, 2**24, {"a": np.zeros(99, np.uint8)})

    def read_sample(request: Any) -> Any:
        looked_at.append(request.id)
        if request.id and not is_readable:
            raise UserError("It is no image.")
        wanted = SampleRequest([1], 1, 0, scores=False, top=0, last=None, images=images)
        return SimpleNamespace(request=wanted, is_alike=lambda other: True)

    waiting = {number: SimpleNamespace(id=number) for number in range(100)}
    queue = SimpleNamespace(samples=lambda: [*waiting.values()], remove_sample=waiting.pop)
    failed: list[int] = []
    samples: Any = WaitingSamples(
        SimpleNamespace(read_sample=read_sample),  # type: ignore[arg-type]
        queue,  # type: ignore[arg-type]
        set(),
        lambda request, reason: failed.append(request.id),
    )
    beside = [*samples.take_beside(waiting.pop(0))]
    # The first one, and those up to the one that is too many.
    assert 5 < len(looked_at) < 20
    assert len(failed if not is_readable else beside) == len(looked_at) - 2 + (not is_readable)
