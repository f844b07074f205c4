"""Chooses at the start of a run how the parts of its model are computed, and says it in one line.

Linear layers are computed together wherever --kernels is auto, and experts are padded on GPUs
without a grouped kernel: that follows from model and GPU alone, so two runs of one configuration
have the same bits. On a GPU each part takes its fastest kernel
among those that are right there: first in a process of its own (trial_process.py), then on every
rank with the run's sizes.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.graph_lengths import filled_length
from fsdp_qlora.distributed.process_group import all_gather_strings, release_cached_memory
from fsdp_qlora.model.architecture.attention_kernels import CUDNN
from fsdp_qlora.model.kernels.in_use import GRAPHS, PLAIN, Ways, using_ways, ways_of_option
from fsdp_qlora.model.kernels.trial import PartTrials, milliseconds, reason_of, why_wrong
from fsdp_qlora.model.quantizers.padded_groups import PADDED, experts_way
from fsdp_qlora.planning.placement import has_room_for_graphs
from fsdp_qlora.planning.plan import ModelPlan, layer_options
from fsdp_qlora.planning.run_plan import Plan
from fsdp_qlora.run.graph_trials import BlockForm
from fsdp_qlora.run.kernel_trials import KernelForm, trials
from fsdp_qlora.run.trial_process import NotTried, Verdicts, tried_apart

log = logging.getLogger("fsdp_qlora")

# Less is within what two measurements differ by.
_GAIN = 1.02
# Filling up micro-batches for graphs may cost some of what they gain.
_GAINS = {GRAPHS: 1.1}
# Ways are timed with documents of one length, which most texts do not have. One that takes no
# others is the last choice.
_OF_EQUAL_LENGTHS = (CUDNN,)


class Measured(NamedTuple):
    """A part's ways on a rank, or on all.

    milliseconds: of those that are right. reasons: not to take the others.
    """

    milliseconds: dict[str, float]
    reasons: dict[str, str]


_NOTHING = Measured({}, {"others": "not tried on every rank"})


def graphed_parts(config: TrainConfig, plan: Plan) -> list[str]:
    """The parts of a run's model that may be graphs on this rank: blocks, answers."""
    if config.kernels == PLAIN:
        return []
    parts = []
    if plan.generation or plan.held_out or config.sample_prompts:
        parts.append("answers")
    if has_room_for_graphs(plan.placed, may_keep=config.recompute == "auto"):
        parts.append("blocks")
    return parts


@dataclass(frozen=True)
class TriedKernels:
    """The ways that a run may take. Made on every rank before ranks wait for each other.

    form: None where only plain kernels are there.
    """

    option: str
    device: torch.device
    form: KernelForm | None = None
    verdicts: Verdicts = field(default_factory=dict)
    failure: str = ""

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        *plans: ModelPlan,
        graphed: Sequence[str] = (),
        num_tokens: int = 0,
    ) -> "TriedKernels":
        """Try the kernels of planned models on this machine, if it has a GPU.

        Args:
            plans: of the model that trains, and of a teacher.
            graphed: the parts that may be graphs, for the first one: blocks, answers.
            num_tokens: of the longest micro-batch, for its blocks as graphs.
        """
        device = plans[0].machine.device
        if config.kernels == PLAIN or device.type != "cuda":
            return cls(config.kernels, device)
        form = KernelForm.of(config, *plans)
        if graphed:
            layers = layer_options(config, plans[0].config, plans[0].packed)
            block = BlockForm.of(config, plans[0], layers)
            if block is not None:
                block = block._replace(num_tokens=filled_length(num_tokens))
            form = replace(form, block=block, graphed=[*graphed])
        verdicts: Verdicts = {}
        failure = ""
        try:
            if any(part.apart for part in trials(form, device)):
                verdicts = tried_apart(form, device)
        except NotTried as error:
            failure = f"the process of its trial {error}"
        except Exception as error:  # of a library: plain kernels are always there
            failure = reason_of(error)
        return cls(config.kernels, device, form, verdicts, failure)

    def choose(self, before: Mapping[str, str] | None = None) -> Ways:
        """The ways of the run, the same on all ranks. Collective.

        Args:
            before: those that the run has taken so far, as `Start.ways`.
        """
        ways = ways_of_option(self.option)
        reasons: dict[str, str] = {}
        if self.form is not None:
            experts = self._experts_way(self.form)
            mine = json.dumps(self._all_measured(self.form))
            sent = all_gather_strings(mine, self.device)
            found = merged([_from_json(each) for each in sent])
            kept = kept_ways(before)
            chosen = {part: fastest(each, kept.get(part)) for part, each in found.items()}
            ways = ways._replace(experts=kept.get("experts", experts), **chosen)
            reasons = {
                part: each.reasons.get(kept.get(part, ""), "") for part, each in found.items()
            }
            log.info("%s", describe(found, chosen))
            release_cached_memory(self.device)
        change = describe_change(before, ways, self.option, reasons) if before is not None else ""
        if change:
            log.info("%s", change)
        return ways

    def _experts_way(self, form: KernelForm) -> str:
        """The way of experts: padded if any rank's GPU has no grouped kernel. Collective."""
        if not any(shape.chosen for shape in form.shapes):
            return PLAIN
        own = experts_way(self.device, form.torch_dtype)
        return PADDED if PADDED in all_gather_strings(own, self.device) else PLAIN

    def _all_measured(self, form: KernelForm) -> dict[str, Measured]:
        """This rank's findings, by part. It raises nothing, since the others wait for it."""
        found: dict[str, Measured] = {}
        ways = ways_of_option(self.option)
        try:
            for part in trials(form, self.device):
                # The last part is timed by the ways of those before.
                with using_ways(ways):
                    found[part.part] = self._measured(part)
                ways = ways._replace(**{part.part: fastest(found[part.part])})
            return found
        except Exception as error:  # a broken installation of a library
            log.debug("Kernels: %s", error)
            return {}

    def _measured(self, part: PartTrials) -> Measured:
        times: dict[str, float] = {}
        reasons = dict(part.missing)
        try:
            timed = part.timed()
            times[PLAIN] = milliseconds(timed, PLAIN, self.device)
        except Exception as error:
            return Measured(times, reasons | {"others": reason_of(error)})
        for way in part.ways:
            reason = self._why_not(part, way)
            try:
                if not reason:
                    times[way] = milliseconds(timed, way, self.device)
            except Exception as error:
                reason = reason_of(error)
            if reason:
                reasons[way] = reason
        return Measured(times, reasons)

    def _why_not(self, part: PartTrials, way: str) -> str:
        reason = ""
        if way in part.apart:
            reason = self.verdicts.get(part.part, {}).get(way, self.failure or "not tried")
        for make in part.proofs:
            reason = reason or why_wrong(make, [way])[way]
        return reason


def _from_json(text: str) -> dict[str, Measured]:
    return {part: Measured(*found) for part, found in json.loads(text).items()}


def merged(ranks: Sequence[Mapping[str, Measured]]) -> dict[str, Measured]:
    """The findings of all ranks: a way that is right on each, with the time of the slowest."""
    found: dict[str, Measured] = {}
    for part in dict.fromkeys(part for rank in ranks for part in rank):
        measured = [rank.get(part, _NOTHING) for rank in ranks]
        reasons: dict[str, str] = {}
        for each in measured:
            reasons = {**each.reasons, **reasons}
        times = {
            way: max(each.milliseconds[way] for each in measured)
            for way in measured[0].milliseconds
            if all(way in each.milliseconds for each in measured)
        }
        found[part] = Measured(times, reasons)
    return found


def fastest(found: Measured, kept: str | None = None) -> str:
    """The way to take: the one of a run that continues if it is right here."""
    times = found.milliseconds
    if kept == PLAIN or kept in times:
        return kept
    of_all = {way: time for way, time in times.items() if way not in _OF_EQUAL_LENGTHS}
    for candidates in (of_all, times):
        best = min(candidates, key=candidates.__getitem__, default=PLAIN)
        gain = _GAINS.get(best, _GAIN)
        if times.get(best, 0) * gain < times.get(PLAIN, 0):
            return best
    return PLAIN


def kept_ways(before: Mapping[str, str] | None) -> Mapping[str, str]:
    """The ways that a run keeps. One that was plain altogether did not choose them."""
    if before is None or before.get("linears", PLAIN) == PLAIN:
        return {}
    # Its micro-batches were not filled up, and its answers' keys not padded.
    return {"blocks": PLAIN, "answers": PLAIN} | dict(before)


def describe(found: Mapping[str, Measured], chosen: Mapping[str, str]) -> str:
    """One line of what was chosen, how much faster it is, and what was left out and why."""
    taken = []
    left: dict[tuple[str, str], list[str]] = {}
    for part, (times, reasons) in found.items():
        way = chosen[part]
        if way == PLAIN:
            taken.append(f"{part} plain")
        else:
            taken.append(f"{part} {way} ({times[PLAIN]:.2f} -> {times[way]:.2f} ms)")
        for other, reason in reasons.items():
            left.setdefault((other, reason), []).append(part)
        for other in sorted(times.keys() - {way, PLAIN}):
            reason = f"{times[PLAIN]:.2f} -> {times[other]:.2f} ms"
            left.setdefault((other, reason), []).append(part)
    ends = [f"; not {way} ({', '.join(parts)}): {reason}" for (way, reason), parts in left.items()]
    return f"Kernels: {', '.join(taken) or 'plain'}{''.join(ends)}"


def describe_change(
    before: Mapping[str, str], ways: Ways, option: str, reasons: Mapping[str, str] | None = None
) -> str:
    """A line for a run whose parts were computed in other ways before; empty if none was.

    Args:
        before: as `Start.ways`; parts without a name in it were plain.
        option: the value of --kernels now.
        reasons: why a part's way of before is not taken, where it is not right here.
    """
    # A later version may know other parts: whatever they were, here they are plain.
    known = Ways()._asdict() | dict(before)
    now = dict.fromkeys(known, PLAIN) | ways._asdict()
    changes = []
    for part, way in known.items():
        if way != now[part]:
            reason = (reasons or {}).get(part)
            changes.append(f"{part} {way} then, {now[part]} now{f' ({reason})' if reason else ''}")
    if not changes:
        return ""
    end = ", as --kernels plain asks."
    if option != PLAIN:
        end = (
            ". Results are as accurate, but other sums are rounded; --kernels plain has none of it."
        )
    return f"The run continues with other kernels: {'; '.join(changes)}{end}"
