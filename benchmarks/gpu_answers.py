"""The part of gpu.py that measures answers: tokens of 1, 16 and 64 answers of the whole 8B."""

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.gpu_parts import (
    build,
    note,
    process_group,
    release,
    reserved,
    reset_peak,
    row,
    work_of,
)
from benchmarks.gpu_steps import GIB, Batch, Timed
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.model.kernels.in_use import GRAPHS, PLAIN, using_ways, ways_in_use
from fsdp_qlora.training.generation.generator import NONE_KEPT, KeptWeights, TextGenerator
from fsdp_qlora.training.generation.sampling import Completion, SamplingOptions, Stops

# How tokens are computed: the way in `Ways`, and the weights that stay.
_WAYS = {
    "plain": (PLAIN, NONE_KEPT),
    "decoded once": (PLAIN, KeptWeights(are_decoded=True, are_in_place=True)),
    "graphs": (GRAPHS, KeptWeights(are_decoded=False, are_in_place=True)),
    "graphs, decoded once": (GRAPHS, KeptWeights(are_decoded=True, are_in_place=True)),
}
_NUMBERS = (1, 16, 64)


def measure_decode(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Tokens that the whole 8B draws for 1, 16 and 64 prompts at a time, by each way.

    With the share of tokens that are those of the plain way, and the memory of a step after them.
    """
    work = work_of(args, ranks, "8b", (Batch(4, 2048),), layers=args.layers)
    prompt, tokens = (32, 20) if args.tiny else (512, 40)
    found: dict[str, Any] = {"ms_per_token": {}, "answers_gib": {}, "same_tokens": {}, "rows": []}
    with process_group(ranks):
        train, [step_rows] = build(work, ranks)
        for number in _NUMBERS:
            prompts = {index: list(range(2, prompt + 2 - index % 3)) for index in range(number)}
            speeds: dict[str, float] = {}
            expected: list[int] = []
            for name in _WAYS:
                label = f"{number} at a time, {name}"
                release(ranks.device)
                reset_peak(ranks.device)
                seconds, drawn = _answer(train, ranks, name, prompts, tokens)
                speeds[name] = number / seconds
                expected = expected or drawn
                same = np.equal(drawn, expected).mean() if len(drawn) == len(expected) else 0.0
                found["same_tokens"][label] = float(same)
                found["ms_per_token"][label] = 1e3 * seconds
                found["answers_gib"][label] = reserved(ranks.device) / GIB
            item = f"{number} answers, 8B, prompts of {prompt}"
            found["rows"].append(row(item, "tokens/s", speeds))
            note(args, found)  # for the case that time runs out
        # Whether what answers reserved counts as the step's.
        found["step_after_answers_gib"] = train.one(step_rows)[0]["memory_gib"]
    return found


def _answer(
    train: Timed, ranks: Ranks, way: str, prompts: Mapping[int, Sequence[int]], tokens: int
) -> tuple[float, list[int]]:
    """The median seconds of a token, and all tokens that were drawn."""
    chosen, kept = _WAYS[way]
    model = train.run.trainer.model
    precision = train.run.plan.placed.model.precision
    # No end token: all answers have all tokens.
    stops = Stops(SimpleNamespace(eos_token_id=None), model, "")
    options = SamplingOptions(tokens, temperature=1.0, seed=1)
    generator = TextGenerator(model, ranks, precision, stops, options, kept)
    passes: list[float] = []
    with using_ways(ways_in_use()._replace(answers=chosen)):
        answers: dict[int, Completion] = generator.generate(
            prompts, beat=lambda: passes.append(time.perf_counter())
        )
    drawn = [token for answer in answers.values() for token in answer.token_ids]
    # Not the prompts, nor the first tokens, which are captured. On the stand-in without values an
    # answer ends with its first token.
    each = np.diff(passes[4:]).tolist()
    return statistics.median(each) if each else float("nan"), drawn
