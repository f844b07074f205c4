"""The images of the commands in work, for the processor of a base that takes images."""

import contextlib
import io
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.row_images import images_of_rows
from fsdp_qlora.data.batches.rows import NO_ROWS
from fsdp_qlora.data.content import most_row_bytes
from fsdp_qlora.data.run_data import RunData
from fsdp_qlora.data.text.image_processor import NO_FILES, ImageProcessor
from fsdp_qlora.data.text.image_store import read_sent
from fsdp_qlora.distributed.process_group import all_gather_strings
from fsdp_qlora.planning.image_memory import image_bytes
from fsdp_qlora.planning.plan import ModelPlan
from fsdp_qlora.service.messages import rows_of_tokens
from fsdp_qlora.service.sent_images import BaseImages, SentImage, SequenceReader
from fsdp_qlora.utils.errors import UserError

log = logging.getLogger("fsdp_qlora")

_TRIED = (224, 224, 3)  # pixels in RGB of the image that is tried at the start
_NUM_TOKENS = 8  # of text around it
_MILLION = 10**6
_BY_GLOO = torch.device("cpu")


class ServedImages:
    """Holds the images of the command in work.

    Nothing of them is written: a request has its images in its recorded body, and its command
    brings them to all ranks, whatever machines these are on.

    Args:
        config: of the base.
        plan: of the base, whose weights are not loaded.

    Attributes:
        base: what the base makes of images.
        value_bytes: for each value that the processor makes of images, an estimate.
    """

    def __init__(self, config: TrainConfig, plan: ModelPlan) -> None:
        self._contents: Mapping[str, np.ndarray] = {}
        self.base = self._agreed(self._base(config, plan))
        self.value_bytes = math.inf
        if self.base.processor is not None:
            towers = plan.meta.parts.towers.values()
            needed = image_bytes(towers, _MILLION, keeps_inputs_only=False)
            self.value_bytes = sum(needed) / _MILLION

    def _base(self, config: TrainConfig, plan: ModelPlan) -> BaseImages:
        name = config.model_name
        if not plan.meta.parts.towers:
            return BaseImages(refusal=f"{name} takes text alone: serve a model for images")
        if config.context_size > 1:
            return BaseImages(refusal="--context_parallel_size divides rows of text: leave it out")
        processor = ImageProcessor.find(plan.folder, name, self._load)
        if processor is None:
            return BaseImages(refusal=f"the folder of {name} {NO_FILES}")
        try:
            # The first use loads it: what it lacks is said now.
            tokens = ", ".join(map(str, sorted(processor.image_ids)))
            log.debug("These tokens stand for images: %s.", tokens)
        except UserError as error:
            log.info("Images are not served. %s", error)
            return BaseImages(refusal=f"images are not served: {str(error).rstrip('.')}")
        return BaseImages(processor)

    def _agreed(self, own: BaseImages) -> BaseImages:
        """Agree with the other ranks: none serves images if one of them lacks what they need.

        Others would wait for that one in the passes that try an image.
        """
        refusals = all_gather_strings("" if own.processor else own.refusal, _BY_GLOO)
        for rank, refusal in enumerate(refusals):
            if refusal and own.processor:
                log.info("Images are not served, as on rank %d: %s.", rank, refusal)
            if refusal:
                return BaseImages(refusal=refusal)
        if own.processor:
            log.info("Images are served.")
        return own

    def _load(self, name: bytes) -> Any:
        return read_sent(self._contents[name.hex()].tobytes(), most_row_bytes() // 3)

    @contextlib.contextmanager
    def at_hand(self, contents: Mapping[str, np.ndarray]) -> Iterator[None]:
        """Hold the bytes of images, by their hexadecimal names, in the block."""
        self._contents = contents
        try:
            yield
        finally:
            self._contents = {}

    @contextlib.contextmanager
    def trial(self) -> Iterator[RunData]:
        """Give two rows with an image in the block, to try the loaded model with.

        They are none if the base takes no images.
        """
        nothing = np.arange(0)
        if self.base.processor is None:
            yield RunData(NO_ROWS, nothing, NO_ROWS)
            return
        image = SentImage(_picture(), None)
        text = np.arange(1, _NUM_TOKENS + 1, dtype=np.int32)
        reader = SequenceReader(self.base, longest=2**31)
        # Of two lengths.
        sequences = [
            reader.read([text, image, text[:count]], "The image that is tried")
            for count in (_NUM_TOKENS // 2, _NUM_TOKENS)
        ]
        images = images_of_rows([shown.row for _, shown in sequences])
        table = rows_of_tokens([tokens for tokens, _ in sequences], images)
        with self.at_hand(sequences[0][1].contents):
            yield RunData(table, nothing, NO_ROWS, image_processor=self.base.processor)


def _picture() -> bytes:
    """A PNG of noise."""
    from PIL import Image as Pillow

    noise = np.random.default_rng(0).integers(256, size=_TRIED, dtype=np.uint8)
    file = io.BytesIO()
    Pillow.fromarray(noise).save(file, "png")
    return file.getvalue()
