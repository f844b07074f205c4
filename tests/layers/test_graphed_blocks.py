"""A decoder block that is computed by graphs leaves everything around it as it was."""

import weakref
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from fsdp_qlora.model.quantizers.base import QuantizedWeight
from fsdp_qlora.sharding import block_graphs, graphed
from fsdp_qlora.sharding.graphed import GraphedBlocks
from fsdp_qlora.sharding.recompute import recomputed_blocks, set_graphs
from tests.layers.test_graph_trials import CPU, form_of

TOKENS = 64


class Captured(block_graphs.Replayed):
    """Work that is done once before it is replayed, as a capture does."""

    def __init__(self, work: Any, *args: Any) -> None:
        work()
        super().__init__(work, *args)


def refuses(*args: Any) -> None:
    raise RuntimeError("not permitted")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """A model of a block that graphs compute from its first call on."""
    monkeypatch.setattr(graphed, "_PASSES_BEFORE", 0)
    model = form_of("gemma2").build(CPU)
    set_graphs(model, GraphedBlocks(TOKENS))
    return model


def graphs_of(model: PreTrainedModel) -> GraphedBlocks:
    [block] = recomputed_blocks(model)
    assert block.graphs is not None
    return block.graphs


def compute(model: PreTrainedModel, value: float = 0.5) -> torch.Tensor:
    width = model.config.hidden_size
    x = torch.full((1, TOKENS, width), value, dtype=torch.bfloat16, requires_grad=True)
    output = model.base_model(inputs_embeds=x, use_cache=False)
    return output[0]


def test_hooks_around_a_block_get_its_input_alone(model, monkeypatch):
    monkeypatch.setattr(block_graphs, "Replayed", Captured)
    [block] = recomputed_blocks(model)
    seen = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor

    class Store:
        def __init__(self) -> None:
            self.pack = pack
            self.unpack = lambda tensor: tensor

    block.store = Store()
    compute(model)
    assert graphs_of(model).nbytes and not graphs_of(model).reasons
    assert [tensor.shape[1] for tensor in seen] == [TOKENS]


def test_a_failed_capture_is_freed_before_the_block_runs_without(model, monkeypatch):
    kept: list[weakref.ref[Any]] = []
    memory_of = graphed.StructureMemory

    def memory(*args: Any) -> Any:
        made = memory_of(*args)
        kept.extend(map(weakref.ref, (made, made.weights)))
        return made

    def without(*args: Any, **kwargs: Any) -> Any:
        alive.append([each() is not None for each in kept])
        return checkpoint(*args, **kwargs)

    alive: list[list[bool]] = []
    checkpoint = graphed.checkpoint
    monkeypatch.setattr(graphed, "StructureMemory", memory)
    monkeypatch.setattr(graphed, "checkpoint", without)
    monkeypatch.setattr(block_graphs, "Replayed", refuses)
    compute(model)
    assert alive == [[False, False]]
    assert "not permitted" in graphs_of(model).reasons[0]


def test_quantized_layers_view_no_static_memory(model):
    compute(model)
    layers = [each for each in model.modules() if isinstance(each, QuantizedWeight)]
    assert graphs_of(model).nbytes and layers
    assert all(layer._views is None for layer in layers)


def test_a_block_whose_output_is_nan_keeps_its_graphs(model):
    assert compute(model, float("nan")).isnan().all()
    assert graphs_of(model).nbytes and not graphs_of(model).reasons


def test_a_block_keeps_a_forward_of_its_own(model):
    block: Any = recomputed_blocks(model)[0]._checkpoint_wrapped_module
    forward = block.forward
    calls = []

    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return forward(*args, **kwargs)

    block.forward = own
    compute(model)
    assert vars(block)["forward"] is own and calls
    assert graphs_of(model).nbytes


def test_large_arguments_have_no_static_memory(model, monkeypatch):
    monkeypatch.setattr(graphed, "_MOST_OF_ARGUMENTS", 0)
    compute(model)
    graphs = graphs_of(model)
    assert "masks and other arguments" in graphs.reasons[0] and not graphs.nbytes
    # micro-batches with smaller ones have
    monkeypatch.setattr(graphed, "_MOST_OF_ARGUMENTS", 2**24)
    compute(model)
    assert graphs.nbytes
