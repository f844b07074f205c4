"""The base that an adapter is merged into: its original weights, or what is left of them after quantization."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh

from fsdp_qlora.loading.load_weights import load_quantized
from fsdp_qlora.loading.weight_files import Weights
from fsdp_qlora.quantizers.base import QuantizedWeight

# (start, stop) -> those elements of a row-major flattened weight, floats on the CPU.
ReadFlat = Callable[[int, int], torch.Tensor]


class OriginalBase:
    """The weights in the files."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def open(self, name: str) -> ReadFlat:
        """A way to read the weight `name` of the model."""
        source = self.weights.sources[name]
        return lambda start, stop: self.weights.files.read_flat(source, start, stop)


class DequantizedBase(OriginalBase):
    """The weights after the run's quantizer, which the adapter was trained on; one whole weight in memory at a time.

    Args:
        layers: name of a weight -> its layer, on the meta device.
        mesh, device: of this one process.
        first_updates: name of a weight -> changes its rows to those that were quantized (PiSSA, OLoRA).
    """

    def __init__(
        self,
        weights: Weights,
        layers: Mapping[str, QuantizedWeight],
        mesh: DeviceMesh,
        device: torch.device,
        first_updates: "Callable[[str], RowChange | None]",
    ) -> None:
        super().__init__(weights)
        self._layers, self._mesh, self._device, self._first_updates = layers, mesh, device, first_updates

    def open(self, name: str) -> ReadFlat:
        if name not in self._layers:
            return super().open(name)
        layer = self._layers[name]
        layer.to_empty(device=self._device)
        change = self._first_updates(name)

        def reduce(values: torch.Tensor) -> torch.Tensor:
            assert change is not None
            rows = values.view(-1, layer.shape[-1])
            return torch.cat([change(part, first) for first, part in in_pieces(rows)]).flatten()

        load_quantized(name, layer, self.weights, self._mesh, self._device, reduce if change else None)
        whole = layer.dequantize().cpu().flatten()
        layer.to("meta")
        return lambda start, stop: whole[start:stop]


RowChange = Callable[[torch.Tensor, int], torch.Tensor]  # (rows [n, columns], number of the first) -> new rows

_PIECE = 2**22  # weights


def in_pieces(rows: torch.Tensor) -> Iterable[tuple[int, torch.Tensor]]:
    """(number of the first row, some rows) for all rows of a matrix."""
    size = max(1, _PIECE // rows.shape[1])
    return ((start, rows[start : start + size]) for start in range(0, len(rows), size))
