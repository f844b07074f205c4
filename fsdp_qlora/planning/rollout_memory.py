"""The generation of a run that learns from its own answers: how many at a time, and whether weights stay gathered."""

from typing import NamedTuple

from transformers import PretrainedConfig

from fsdp_qlora.model.architecture.attention import Shapes
from fsdp_qlora.model.model_parts import count_bytes
from fsdp_qlora.planning.fit import with_margin
from fsdp_qlora.planning.placement import PlacedModel
from fsdp_qlora.utils.text import GIB, format_bytes

_LEAST_ON_CPU = GIB  # bytes for the completions of a rank on a CPU, whose steps may need less
_COPIES = 4  # of a completion's logits in float32 while a token is drawn: logits, probabilities, noise, ratio


class Generation(NamedTuple):
    """How a rank generates the completions of a step.

    at_a_time: completions that share a cache. per_rank: completions of a step, at most. cache: bytes of the cache.
    gathered: bytes of the blocks' weights if they stay gathered; 0 if they are gathered for each token.
    """

    at_a_time: int
    per_rank: int
    cache: int
    gathered: int

    def describe(self, num_prompts: int, num_generations: int, num_left: int) -> str:
        """One line for the plan. num_left: prompts of an epoch that fill no step."""
        weights = f"; weights stay gathered ({format_bytes(self.gathered)})" if self.gathered else ""
        left = f"; an epoch leaves out {num_left} prompts, which fill no step" if num_left else ""
        return (
            f"Generation: {num_generations} answers to each of {num_prompts} prompts for a step, of {self.per_rank} on "
            f"a rank {self.at_a_time} at a time (cache {format_bytes(self.cache)}){weights}{left}"
        )


def plan_generation(placed: PlacedModel, num_answers: int, longest: int, free: int | None) -> Generation:
    """As many answers at a time as fit into what a training step needs beside what stays, and at least one.

    Args:
        num_answers: of a step on all ranks. longest: tokens of a prompt with its answer. free: bytes of the GPU that
            has least; weights stay gathered if a rank then still needs less.
    """
    model, memory, layout = placed.model, placed.memory, placed.layout
    room = sum(memory.phases[memory.peak].values()) + memory.overhead
    room = room if model.machine.device.type == "cuda" else max(room, _LEAST_ON_CPU)
    itemsize = model.precision.compute_dtype.itemsize
    each = _bytes_of_answer(model.meta.model.config.get_text_config(), longest, itemsize)
    per_rank = -(-num_answers // model.machine.world_size)
    number = min(per_rank, max(1, room // each))
    gathered = 0
    if layout.num_shards > 1 and layout.frees_blocks and not placed.placement.offload.blocks:
        kinds = model.meta.parts.kinds(model.meta.parts.blocks)
        gathered = sum(count.total for count in count_bytes(kinds, 1).values())
        needed = sum(memory.resident.values()) + memory.overhead + number * each + gathered
        fits = gathered + number * each <= room if free is None else with_margin(needed) <= free
        gathered *= fits
    return Generation(number, per_rank, number * each, gathered)


def _bytes_of_answer(config: PretrainedConfig, tokens: int, itemsize: int) -> int:
    """Bytes of an answer's cache, and of what its prompt and its next token need while they are computed."""
    hidden, _, groups, head_dim = Shapes.of(config)
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    cache = 2 * config.num_hidden_layers * groups * head_dim * itemsize
    return int(tokens * (cache + (4 * hidden + 3 * inner) * itemsize) + _COPIES * 4 * config.vocab_size)
