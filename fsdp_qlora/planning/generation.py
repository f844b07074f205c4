"""Plans how a run's own model answers prompts: how many at a time, and what stays in memory."""

from typing import NamedTuple

from transformers import PretrainedConfig

from fsdp_qlora.model.architecture.shapes import block_shapes
from fsdp_qlora.model.model_parts import count_bytes
from fsdp_qlora.model.quantizers.decoded_once import decoded_bytes
from fsdp_qlora.planning.fit import with_margin, without_margin
from fsdp_qlora.planning.gpus import Gpu
from fsdp_qlora.planning.image_memory import image_bytes
from fsdp_qlora.planning.placement import PlacedModel
from fsdp_qlora.planning.speed import seconds_per_pass
from fsdp_qlora.training.generation.model_cache import LENGTH_MULTIPLE, shares_prompts
from fsdp_qlora.utils.text import GIB, format_bytes

_LEAST_ON_CPU = GIB  # bytes for the completions of a rank on a CPU, whose steps may need less
# layers' caches that growing by a token needs beside them: one in and one out, and holes
_GROWING = 3
# of a completion's logits in float32 while a token is drawn: logits, probabilities, noise, ratio
_COPIES = 4


class AnswerSize(NamedTuple):
    """The size of an answer with its prompt, at most."""

    longest: int
    """Tokens of both."""
    most_new: int
    """Tokens of the answer."""
    image_values: int = 0
    """The number of values that the processor makes of the prompt's images."""
    per_prompt: int = 1
    """The number of answers to each prompt, which follow each other."""


class Generation(NamedTuple):
    """How a rank generates the completions of a step.

    at_a_time: completions that share a cache. per_rank: completions of a step, at most. cache:
    bytes of the cache. gathered: bytes of the blocks' weights if they stay gathered; 0 if they are
    gathered for each token. decoded: bytes of base weights that are decoded once for a batch; 0 if
    they are decoded for each token. stays: whether the blocks' weights stay in their memory between
    tokens. seconds: for the longest completions; None if no GPU is known.
    """

    at_a_time: int
    per_rank: int
    cache: int
    gathered: int
    decoded: int = 0
    stays: bool = False
    seconds: float | None = None

    def describe(self, num_prompts: int, num_generations: int, num_left: int) -> str:
        """One line for the plan. num_left: prompts of an epoch that fill no step."""
        line = (
            f"Generation: {num_generations} answers to each of {num_prompts} prompts for a step, "
            f"{self._describe_batches('generation')}"
        )
        if num_left:
            line += f"; an epoch leaves out {num_left} prompts, which fill no step"
        return line

    def describe_evaluation(self, num_prompts: int) -> str:
        """One line for the plan. num_prompts: of the largest set that is evaluated."""
        return (
            f"Evaluation: answers to {num_prompts} held-out prompts, "
            f"{self._describe_batches('evaluation')}"
        )

    def _describe_batches(self, name: str) -> str:
        """How many completions a rank generates at a time, and what it keeps meanwhile."""
        text = (
            f"of {self.per_rank} on a rank {self.at_a_time} at a time "
            f"(cache {format_bytes(self.cache)})"
        )
        if self.gathered:
            text += f"; weights stay gathered ({format_bytes(self.gathered)})"
        if self.decoded:
            text += f"; weights are decoded once ({format_bytes(self.decoded)})"
        if self.seconds is not None:
            text += f"; at most about {self.seconds:,.0f} s per {name}"
        return text


def plan_generation(
    placed: PlacedModel,
    num_answers: int,
    size: AnswerSize,
    free: int | None,
    gpu: Gpu | None = None,
    *,
    has_turns: bool = False,
) -> Generation:
    """Plan the answers that are generated at a time: as many as fit, and at least one.

    They fit beside what stays in memory, with a step's margin, in equal rounds.

    Args:
        num_answers: of a step on all ranks.
        size: of each.
        free: bytes of the GPU that has least; without it they get what a step needs. Weights stay
            gathered if they fit beside as many as a step has room for.
        gpu: for the time.
        has_turns: whether answers have several turns, each behind all tokens before it.
    """
    model = placed.model
    memory = placed.memory
    itemsize = model.precision.compute_dtype.itemsize
    # A cache has room for further tokens (training/generation/model_cache.py).
    longest = -(-size.longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    least_new = 1 if has_turns else size.most_new
    answer_bytes = _bytes_of_answer(model.meta.model.config, longest, least_new, itemsize)
    per_rank = -(-num_answers // model.machine.world_size)
    images = _bytes_of_images(placed, size.image_values)
    together = _answers_with_common_images(placed, size.per_prompt * per_rank // num_answers)
    answer_bytes += -(-images // together)
    towers = _bytes_of_towers(placed) if size.image_values else 0
    # A batch may begin and end within the answers to a prompt: k answers, n of them to each prompt,
    # show (k - 2) / n + 2 prompts.
    towers += 2 * images * (together > 1)
    room = _room(placed) - towers
    at_a_time = min(per_rank, max(1, room // answer_bytes))
    gathered = _bytes_kept_gathered(placed, at_a_time * answer_bytes + towers, free)
    beside_gathered = room - gathered
    if free is not None:
        beside = sum(memory.resident.values()) + memory.overhead + gathered + towers
        beside_gathered = max(beside_gathered, without_margin(free) - beside)
        room = max(room, beside_gathered)
        at_a_time = min(per_rank, max(1, room // answer_bytes))
    # Equal rounds: a small last one would take as long as a full one, token by token.
    rounds = -(-per_rank // at_a_time)
    at_a_time = -(-per_rank // rounds)
    cache = at_a_time * answer_bytes
    stays = weights_stay(placed, is_gathered=gathered > 0)
    decoded = _bytes_decoded_once(placed, at_a_time, beside_gathered - cache) if stays else 0
    seconds = None
    if gpu:
        per_token = seconds_per_pass(
            placed, gpu, at_a_time, gathered=gathered > 0, is_decoded=decoded > 0
        )
        seconds = rounds * size.most_new * per_token
    return Generation(at_a_time, per_rank, cache, gathered, decoded, stays, seconds)


def weights_stay(placed: PlacedModel, *, is_gathered: bool = False) -> bool:
    """Whether the blocks' weights stay in their memory between passes without gradients.

    They do not if they come from the host for each pass, or from other ranks, unless they are kept
    gathered.
    """
    layout = placed.layout
    moves = layout.frees_blocks and layout.num_shards > 1 and not is_gathered
    return not moves and not placed.placement.offload.blocks


def _room(placed: PlacedModel) -> int:
    """Bytes for generation, which comes between steps: those that a step's peak gives back."""
    memory = placed.memory
    room = sum(memory.phases[memory.peak].values()) + memory.overhead
    if placed.model.machine.device.type != "cuda":
        room = max(room, _LEAST_ON_CPU)
    return room


def _bytes_of_images(placed: PlacedModel, num_values: int) -> int:
    """Bytes for a prompt's images in the pass over prompts, at most."""
    if not num_values:
        return 0
    towers = placed.model.meta.parts.towers.values()
    images = image_bytes(towers, num_values, keeps_inputs_only=True)
    return images.pixels + images.at_work


def _answers_with_common_images(placed: PlacedModel, count: int) -> int:
    """How many answers of a rank to the same prompt have its images in common.

    count: of its answers to a prompt.
    """
    return max(1, count) if shares_prompts(placed.model.meta.model) else 1


def _bytes_of_towers(placed: PlacedModel) -> int:
    """Bytes of the weights for images that the pass over prompts gathers."""
    if placed.layout.num_shards == 1:
        return 0
    parts = placed.model.meta.parts
    counts = [count_bytes(parts.kinds(tower), 1) for tower in parts.towers.values()]
    return sum(count.total for each in counts for count in each.values())


def _bytes_kept_gathered(placed: PlacedModel, cache: int, free: int | None) -> int:
    """Bytes of the blocks' weights that stay gathered; 0 if they need not, or do not fit.

    Args:
        cache: bytes of as many answers as a step has room for, and of what they need besides.
        free: as for `plan_generation`.
    """
    layout = placed.layout
    if layout.num_shards == 1 or not layout.frees_blocks or placed.placement.offload.blocks:
        return 0
    memory = placed.memory
    parts = placed.model.meta.parts
    kinds = parts.kinds(parts.blocks)
    gathered: int = sum(count.total for count in count_bytes(kinds, 1).values())
    if free is None:
        return gathered if gathered + cache <= _room(placed) else 0
    needed = sum(memory.resident.values()) + memory.overhead + cache + gathered
    return gathered if with_margin(needed) <= free else 0


def _bytes_decoded_once(placed: PlacedModel, at_a_time: int, room: int) -> int:
    """Bytes of the base weights that a batch decodes once; 0 if there is no room for them.

    room: bytes beside the cache.
    """
    model = placed.model
    blocks = model.meta.parts.blocks
    needed = decoded_bytes(blocks.modules(), at_a_time, model.machine.device)
    return needed if needed <= room else 0


def _bytes_of_answer(config: PretrainedConfig, tokens: int, most_new: int, itemsize: int) -> int:
    """Bytes of an answer's cache, and of its computation.

    The computation is of the prompt (with a mask) or of the last token.

    The stand-in for CUDA reserves 59 to 96% of it for 8 to 128 answers of an 8B with 12 blocks.
    """
    shapes = block_shapes(config)
    prompt = tokens - most_new
    hidden = shapes[0].hidden
    inner = max(shape.inner for shape in shapes)

    def caches(tokens: int) -> list[int]:
        lengths = [min(shape.window or tokens, tokens) * shape.has_keys for shape in shapes]
        return [
            2 * itemsize * n * shape.groups * shape.head_dim
            for n, shape in zip(lengths, shapes, strict=True)
        ]

    at_prompt = sum(caches(prompt)) + prompt * (
        (4 * hidden + 3 * inner) * itemsize + (1 + itemsize) * prompt
    )
    at_end = sum(caches(tokens)) + _GROWING * max(caches(tokens))
    return max(at_prompt, at_end) + _COPIES * 4 * config.get_text_config().vocab_size
