"""The arguments of a loaded model for images."""

import inspect

from transformers import PreTrainedModel

from fsdp_qlora.data.batches.image_inputs import ImageInputs
from fsdp_qlora.data.text.image_processor import ImageProcessor
from fsdp_qlora.model.architecture.image_positions import positions_of_rows


def image_inputs_of(model: PreTrainedModel, processor: ImageProcessor | None) -> ImageInputs | None:
    """Return what makes the arguments for images of a model; None if it takes none.

    processor: the model's, if it has one.
    """
    if processor is None:
        return None
    taken = inspect.signature(type(model).forward).parameters
    return ImageInputs(processor, taken, positions_of_rows(model))
