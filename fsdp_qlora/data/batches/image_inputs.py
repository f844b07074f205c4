"""The model's arguments for the images of a micro-batch, and positions of rows with images."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fsdp_qlora.data.batches.micro_batch import BESIDE, MicroBatch
from fsdp_qlora.data.batches.rows import TokenizedRows
from fsdp_qlora.data.text.image_processor import ImageProcessor

Outputs = Mapping[str, torch.Tensor]
_LENGTHS_OF_TEACHER = f"{BESIDE}document_lengths"


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

        The model gets the images of a document as often as it computes their tokens: once for the
        documents that share their prompt, and with each document where nothing is shared, such as
        padded rows. Documents that share a prompt share all of its images or none.

        Args:
            rows: of the micro-batch, in its order. Each of their documents shows all of the row's
                images.
            batch: of these rows, all of their tokens. Its own tokens are the model's. A teacher's
                documents may be behind the others.
        """
        outputs = self._outputs(table, rows)
        if _LENGTHS_OF_TEACHER in batch.documents:
            outputs += outputs
        if not any(outputs):
            return {}, batch.documents
        computed = [
            output
            for output, is_computed in zip(outputs, self._computed(batch, outputs), strict=True)
            if output and is_computed
        ]
        is_prompt = _before_answers(batch, outputs)
        images = self.processor.model_inputs(computed, batch.input_ids, self.taken, is_prompt)
        documents = batch.documents
        if documents and self.positions_of:
            positions = self._positions(batch, outputs)
            documents = dict(documents) | {"position_ids": positions}
        return images, documents

    def _outputs(self, table: TokenizedRows, rows: np.ndarray) -> list[Outputs | None]:
        """Outputs of the processor for each document of a micro-batch, None without images.

        Rows with the same images, such as answers to a prompt, have them made once.
        """
        names = [tuple(map(bytes, table.images.of_row(row).names)) for row in rows]
        made = {shown: self.processor.outputs_of(shown) for shown in dict.fromkeys(names) if shown}
        num_documents = len(table.learned_documents(rows))
        return [made.get(names[i * len(rows) // num_documents]) for i in range(num_documents)]

    def _computed(self, batch: MicroBatch, outputs: Sequence[Outputs | None]) -> Sequence[bool]:
        """Whether the model computes the images of each document, and not of another one alike."""
        ends = batch.documents.get("own_ends")
        if ends is None:
            return [True] * len(outputs)
        # A document of padding may be behind the others.
        own = self.processor.kinds_of(batch.input_ids)[0].split(ends.diff().tolist())
        return [bool(tokens.any()) for tokens in own[: len(outputs)]]

    def _positions(self, batch: MicroBatch, outputs: Sequence[Outputs | None]) -> torch.Tensor:
        """Positions of the own tokens of concatenated documents, int64 [axes, 1, N].

        outputs: of the processor for each document, None without images.
        """
        assert self.positions_of is not None
        described = batch.documents
        # Of all T tokens: a position follows from those before it in its document.
        places = described.get("places", slice(None))
        lengths = [*described["document_lengths"], *described.get(_LENGTHS_OF_TEACHER, ())]
        tokens = batch.input_ids[:, places].split(lengths, dim=1)
        # [1, 1, L] of each document: text has the same position on all axes
        parts = [*described["position_ids"][None, :, places].split(lengths, dim=2)]
        num_axes = 1
        # A document of padding may be behind the others.
        for index, output in enumerate(outputs):
            if output is not None:
                inputs = self.processor.model_inputs([output], tokens[index], self.taken)
                parts[index] = self.positions_of(tokens[index], inputs)
                num_axes = len(parts[index])
        positions = torch.cat([part.expand(num_axes, -1, -1) for part in parts], dim=2)
        return positions[..., described.get("own_tokens", slice(None))]


def _before_answers(batch: MicroBatch, outputs: Sequence[Outputs | None]) -> torch.Tensor | None:
    """Whether a token of padded rows with images is before the first learned one, bool [B, T].

    None where rows are concatenated. outputs: of the processor for each row, None without images.
    """
    if batch.documents:
        return None
    num_rows, length = batch.input_ids.shape
    # The last token before those that are learned predicts the first of them.
    last = torch.full((num_rows,), length)
    last.scatter_reduce_(0, batch.target_rows // length, batch.target_rows % length, "amin")
    # A row without images is causal in micro-batches of text, and so in all others.
    last[[index for index, output in enumerate(outputs) if output is None]] = -1
    return torch.arange(length) <= last[:, None]
