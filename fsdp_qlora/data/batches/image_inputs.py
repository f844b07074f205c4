"""The model's arguments for the images of a micro-batch, and positions of rows with images."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fsdp_qlora.data.batches.micro_batch import MicroBatch
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.text.image_processor import ImageProcessor

Outputs = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class ImageInputs:
    """Makes the arguments of a model for images.

    Args:
        processor: the model's.
        taken: the parameters of the model's forward pass, which gets no other arguments.
        positions_of: the model's own function of the positions of a row, [axes, 1, T], from its
            tokens and its arguments for images; None where positions count tokens.
    """

    processor: ImageProcessor
    taken: Mapping[str, Any] = field(default_factory=dict)
    positions_of: Callable[[torch.Tensor, Outputs], torch.Tensor] | None = None

    def of(
        self, table: TokenizedRows, rows: np.ndarray, batch: MicroBatch
    ) -> tuple[dict[str, torch.Tensor], Mapping[str, Any]]:
        """The arguments for the images of some rows, and those that describe the documents.

        Args:
            rows: of the micro-batch, in its order.
        """
        names = [[*map(bytes, table.images.of_row(row).names)] for row in rows]
        outputs = [self.processor.outputs_of(shown) if shown else None for shown in names]
        with_images = [*filter(None, outputs)]
        if not with_images:
            return {}, batch.documents
        images = self.processor.model_inputs(with_images, batch.input_ids, self.taken)
        documents = batch.documents
        if documents and self.positions_of:
            positions = self._positions(batch, outputs)
            documents = dict(documents) | {"position_ids": positions}
        return images, documents

    def _positions(self, batch: MicroBatch, outputs: Sequence[Outputs | None]) -> torch.Tensor:
        """Positions of concatenated rows, int64 [axes, 1, T].

        outputs: of the processor for each row, None without images.
        """
        assert self.positions_of is not None
        lengths = batch.documents["document_lengths"]
        tokens = batch.input_ids.split(lengths, dim=1)
        # [1, 1, L] of each document: text has the same position on all axes
        parts = [*batch.documents["position_ids"][None].split(lengths, dim=2)]
        num_axes = 1
        # A document of padding may be behind the rows.
        for index, output in enumerate(outputs):
            if output is not None:
                inputs = self.processor.model_inputs([output], tokens[index], self.taken)
                parts[index] = self.positions_of(tokens[index], inputs)
                num_axes = len(parts[index])
        return torch.cat([part.expand(num_axes, -1, -1) for part in parts], dim=2)
