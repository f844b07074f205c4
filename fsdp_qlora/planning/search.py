"""Plans variants of one run on given GPUs: which of them fit, and which is the fastest."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches.rows import Lengths
from fsdp_qlora.data.run_data import RunData
from fsdp_qlora.distributed.layout import Layout
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.model.kernels.in_use import using_ways, ways_of_option
from fsdp_qlora.model.model_parts import Offload
from fsdp_qlora.planning.blocks import BlockBytes, measure_blocks
from fsdp_qlora.planning.fit import first_that_fits, with_margin
from fsdp_qlora.planning.fit_host import OF_FREE, WORTH
from fsdp_qlora.planning.gpus import PROCESS, Gpu
from fsdp_qlora.planning.long_attention import keeping_attention
from fsdp_qlora.planning.machine import Machine
from fsdp_qlora.planning.placement import PlacedModel, candidates, context_sizes, place
from fsdp_qlora.planning.plan import ModelPlan
from fsdp_qlora.planning.program_speed import Parts, expected_ways
from fsdp_qlora.planning.run_rows import PlannedRows, RunRows, allowed_rows, make_schedule
from fsdp_qlora.planning.speed import size_of, tokens_per_second
from fsdp_qlora.utils.text import GIB

# The most rows and tokens of a micro-batch that are tried. Weights are gathered once per
# micro-batch: a 70B over the slowest link of gpus.yaml in 13 s (36 GB, 2.8 GB/s). 2^15 tokens take
# that GPU 220 s, so twice as many save 3%.
_FEW_ROWS = 16
_FEW_TOKENS = 2**15
_WORTH = 1.05  # times as fast: what twice the rows per step must be to be proposed


class GpuSet(NamedTuple):
    """GPUs to plan for.

    per_node: GPUs of a machine; 0 for one machine.
    """

    gpu: Gpu
    num_gpus: int
    host_ram_gib: float | None = None
    per_node: int = 0

    def beside_torch(self) -> dict[str, int]:
        """Bytes of a GPU that a run does not get, if its model is sharded over all ranks."""
        return self.gpu.beside_torch(
            Layout(self.num_gpus, self.per_node or self.num_gpus, "full_shard")
        )

    @property
    def bytes(self) -> float:
        """Bytes of a GPU."""
        return self.gpu.memory_gib * GIB

    def free(self, layout: Layout) -> tuple[float, float]:
        """Bytes of a GPU, and of the host, that a rank may take."""
        # leaves a tenth to the system and cached files
        host = math.inf
        if self.host_ram_gib is not None:
            host = 0.9 * self.host_ram_gib * GIB / self.num_gpus - PROCESS
        return self.bytes - sum(self.gpu.beside_torch(layout).values()), host

    @property
    def machine(self) -> Machine:
        """The GPUs, which are not in this machine."""
        ranks = Ranks(0, 0, self.num_gpus, self.num_gpus, torch.device("cpu"))
        free = int(self.bytes) - sum(self.beside_torch().values())
        return Machine(torch.device("cuda"), self.num_gpus, ranks, free, self.gpu.capability)


class PlannedRun(NamedTuple):
    """A planned run: whether it fits and how fast it is.

    tokens: tokens of all epochs. shares: number of ranks that share rows, by which auto multiplied
    the accumulation.
    """

    config: TrainConfig
    placed: PlacedModel
    gpus: GpuSet
    tokens: float
    tokens_per_second: float
    shares: int = 1

    @property
    def beside_torch(self) -> dict[str, int]:
        """Bytes of a GPU that torch's allocator does not get, by what they are."""
        sizes = self.gpus.gpu.beside_torch(self.placed.layout)
        host = sum(self.placed.memory.host.values())
        return sizes | ({"on the host": host} if self.gpus.gpu.shared and host else {})

    @property
    def needed(self) -> int:
        """Bytes of a GPU."""
        return self.placed.memory.reserved + sum(self.beside_torch.values())

    @property
    def rows(self) -> int:
        """Rows of a rank in an optimizer step."""
        return self.config.batch_size * self.config.gradient_accumulation_steps // self.shares

    @property
    def host_bytes(self) -> int:
        """Host bytes of all ranks, processes included."""
        return self.gpus.num_gpus * (sum(self.placed.memory.host.values()) + PROCESS)

    @property
    def fits_host(self) -> bool:
        host_ram_gib = self.gpus.host_ram_gib
        # leaves a tenth to the system and cached files
        return host_ram_gib is None or self.host_bytes <= 0.9 * host_ram_gib * GIB

    @property
    def fits(self) -> bool:
        return self.needed <= self.gpus.bytes and self.fits_host

    @property
    def needed_with_margin(self) -> float:
        """Bytes of a GPU if the estimate is too small by its usual error.

        inf if the host has too little memory: no GPU memory makes up for that.
        """
        if not self.fits_host:
            return math.inf
        # The margin is for the estimate; what torch does not get is known and needs none.
        return with_margin(self.placed.memory.reserved) + sum(self.beside_torch.values())

    @property
    def fits_with_margin(self) -> bool:
        return self.needed_with_margin <= self.gpus.bytes

    @property
    def moves_activations(self) -> bool:
        """Whether blocks keep their activations in host memory."""
        return self.placed.step.on_host.blocks > 0

    @property
    def leaves_host_memory(self) -> bool:
        """Whether activations take no more of the host's memory than a trial would give them.

        False if that memory is not known.
        """
        if self.gpus.host_ram_gib is None:
            return False
        pinned = self.gpus.num_gpus * self.placed.memory.host.get("activations", 0)
        free = self.gpus.host_ram_gib * GIB - (self.host_bytes - pinned)
        return pinned <= OF_FREE * free

    @property
    def hours(self) -> float:
        return self.tokens / self.tokens_per_second / 3600


class Planner:
    """Plans variants of a run.

    The model is built once, and its blocks are measured once for each micro-batch.

    Args:
        model: built with options that differ from the variants' in the placement and the
            micro-batch alone.
        data: the run's rows; None for as many and as long ones as the options allow.
        tokens: number of tokens to train on, if not the rows'.
    Attributes:
        on_operator: called while blocks are measured, as in `measure_blocks`; this takes most of
            the time.
        may_move_activations: whether the fastest settings may keep activations in host memory
            where the options leave it open.
    """

    def __init__(
        self,
        config: TrainConfig,
        gpus: GpuSet,
        model: ModelPlan,
        data: RunData | None = None,
        tokens: float | None = None,
    ) -> None:
        self.config = config
        self.gpus = gpus
        self.model = model
        self.data = data
        self._tokens = tokens
        self.on_operator: Callable[[], object] = lambda: None
        self.may_move_activations = True
        self._size = size_of(model.meta.parts)._replace(trains=bool(config.optimizer))
        # Rows of a dataset have lengths of all kinds.
        self._parts = Parts.of(model, of_equal_lengths=data is None)
        self._rows: dict[tuple[int, ...], PlannedRows] = {}
        self._blocks: dict[tuple[int, ...], list[BlockBytes]] = {}

    def planned(self, **changes: Any) -> PlannedRun:
        """The run with other options.

        With --context_parallel_size auto, the smallest number of ranks that fits shares rows.
        """
        config = dataclasses.replace(self.config, **changes)
        if config.context_parallel_size == "auto":
            runs = []
            for size in self._context_sizes(config):
                run = self.planned(**changes | _shared(config, size))
                runs.append(run._replace(shares=size))
            return first_that_fits(runs, lambda run: run.needed_with_margin, self.gpus.bytes)
        rows = self.rows(config)
        placed = place(
            config,
            self.model,
            rows.longest,
            blocks=self._measure(rows.longest, config.context_size),
        )
        placed = keeping_attention(placed, *self.gpus.free(placed.layout))
        ways = expected_ways(config, self.gpus.gpu, self._parts)
        rate = tokens_per_second(placed, self._size, rows.micro_batch, self.gpus.gpu, ways)
        return PlannedRun(config, placed, self.gpus, self._tokens or rows.tokens, rate)

    def as_asked(self) -> PlannedRun:
        """The run as the options ask for it; with --recompute auto all blocks recompute."""
        # Only a GPU that is here can be probed for how many blocks have to.
        if self.config.recompute == "auto":
            return self.planned(recompute="all")
        return self.planned()

    def rows(self, config: TrainConfig) -> PlannedRows:
        """The rows of the run with other options."""
        data = self.data
        data_size = self.model.machine.data_size(config.context_size)
        key = (config.batch_size, config.gradient_accumulation_steps, config.longest_row, data_size)
        if key not in self._rows:
            if data:
                schedule = make_schedule(
                    config, data, data_size, pads_images=self.model.pads_images
                )
                shares_tokens = self.model.shares_tokens(config.context_size)
                rows = RunRows(config, data, schedule, shares_tokens=shares_tokens).planned()
            else:
                rows = allowed_rows(config, data_size)
            self._rows[key] = rows
        return self._rows[key]

    def _context_sizes(self, config: TrainConfig) -> list[int]:
        # Ranks share rows of text only.
        if self.data and self.data.have_images:
            return [1]
        return context_sizes(config, self.model)

    def _measure(self, lengths: Lengths, shares: int) -> list[BlockBytes]:
        """Bytes that each block keeps and needs for a micro-batch, shared by `shares` ranks."""
        shared = lengths.shared.counts if lengths.shared else ()
        key = (shares, *lengths.of_documents, *shared)
        model = self.model
        if key not in self._blocks:
            with using_ways(ways_of_option(self.config.kernels)):
                self._blocks[key] = measure_blocks(
                    model.meta.parts,
                    model.precision,
                    lengths,
                    model.documents,
                    num_parts=shares,
                    on_operator=self.on_operator,
                )
        return self._blocks[key]

    # --- what would make it fit ---

    def ways_to_fit(self) -> Iterator[PlannedRun]:
        """Settings with which the run fits if it does not, the mildest first."""
        config = self.config
        rows = config.batch_size * config.gradient_accumulation_steps
        one_row: dict[str, Any] = {"batch_size": 1, "gradient_accumulation_steps": rows}
        offload: dict[str, Any] = {"use_cpu_offload": True, "sharding_strategy": "full_shard"}
        offload_inputs = {"recompute": "offload"}
        # Each but the last leaves the losses as they are: the rows of a step do not change.
        variants: list[dict[str, Any]] = [{}, one_row, offload, one_row | offload]
        if config.context_parallel_size == 1 and config.batching != "padded":
            by_row = dataclasses.replace(config, **one_row)
            any_size = dataclasses.replace(config, context_parallel_size="auto")
            for size in self._context_sizes(any_size)[1:]:
                shared = one_row | _shared(by_row, size)
                variants += [shared, shared | offload_inputs]
        variants += [one_row | offload_inputs, one_row | offload | offload_inputs]
        if config.longest_row > 512:
            variants.append(variants[-1] | {"context_length": config.longest_row // 2})
        # A generator: a variant is only planned when those before it do not fit.
        runs = (self.planned(**{"recompute": "all"} | changes) for changes in variants)
        return (run for run in runs if run.fits)

    # --- the fastest settings ---

    def fastest(self, *, keeps_rows: bool = True) -> list[PlannedRun]:
        """Settings by speed: those that fit with a margin, the fastest first; then the others.

        The others come by the memory that they lack. Options that are given are kept, but for the
        size of a micro-batch. The numbers of blocks that recompute and of blocks in host memory are
        as small as fits: time grows with both, so one of them is none or all where it is fastest.
        Activations are kept in host memory where that is 5% faster and takes at most half of what
        is free there; the inputs of blocks, if nothing else fits on the GPU.

        Args:
            keeps_rows: keep the rows per step. Otherwise they double as long as that makes a step
                5% faster: weights that are gathered or come from the host do so once for all rows
                of a micro-batch.
        """
        runs = self._placed_runs({})
        may_offload_inputs = self.config.recompute in ("auto", "all")
        if may_offload_inputs and not any(
            run.fits_with_margin for run in runs if not run.moves_activations
        ):
            runs += self._placed_runs({"recompute": "offload"})
        runs = _by_speed(runs)
        rows = 2 * self.config.batch_size * self.config.gradient_accumulation_steps
        while rows <= self._most_rows and not keeps_rows:
            doubled = {"batch_size": rows, "gradient_accumulation_steps": 1}
            more = _by_speed(self._places(doubled))
            is_worth_it = more[0].tokens_per_second > _WORTH * runs[0].tokens_per_second
            if not (more[0].fits_with_margin and is_worth_it):
                break
            runs = _by_speed(more + runs)
            rows = 2 * rows
        return runs

    def _placed_runs(self, changes: dict[str, Any]) -> list[PlannedRun]:
        """All open placements of each split of a step's rows."""
        runs: list[PlannedRun] = []
        for split in self._micro_batches():
            runs.extend(self._places(split | changes))
        return runs

    @property
    def _most_rows(self) -> int:
        """The largest number of rows of a micro-batch that is tried."""
        most = max(_FEW_ROWS, _FEW_TOKENS // self.config.longest_row)
        if self.data and self.data.prompts:  # each step has prompts of its own
            answers = len(self.data.prompts) * self.config.num_generations
            most = min(most, answers // self.model.machine.data_size(1))
        return most

    def _micro_batches(self) -> Iterator[dict[str, Any]]:
        """The splits of a step's rows that are tried: the given one, and all with few rows."""
        rows = self.config.batch_size * self.config.gradient_accumulation_steps
        for size in sorted({*range(1, self._most_rows + 1), self.config.batch_size}):
            if rows % size == 0:
                yield {"batch_size": size, "gradient_accumulation_steps": rows // size}

    def _places(self, changes: dict[str, Any]) -> Iterator[PlannedRun]:
        """The placements that the options leave open, each with as few blocks recomputing as fit.

        Between nothing and all in host memory, also as few blocks in host memory as fit; there
        none or all blocks recompute. Where the options leave it open, each also with activations
        in host memory.
        """
        config = self.config
        blocks = self._size.blocks
        recompute: list[Any] = [changes.get("recompute", config.recompute)]
        moving: list[Any] = []
        if recompute == ["auto"]:
            recompute = ["none", *range(1, blocks), "all"]
            moving = ["host"] if self.may_move_activations else []
        # One for each strategy and offload: `place` decides itself how gradients are reduced.
        places = {
            (place.sharding_strategy, place.offload): place
            for place in candidates(config, self.model)
        }
        for (strategy, offload), chosen in places.items():
            placed = changes | chosen.options
            yield self._first_that_fits("recompute", recompute, placed)
            for way in moving:
                yield self.planned(**placed | {"recompute": way})
            if not (offload.embeddings and (strategy, Offload()) in places):
                continue
            on_host = range(2, max(3, blocks))
            for way in dict.fromkeys([recompute[0], recompute[-1], *moving]):
                partly = placed | {"recompute": way}
                yield self._first_that_fits("use_cpu_offload", on_host, partly)

    def _first_that_fits(
        self, option: str, values: Sequence[Any], changes: dict[str, Any]
    ) -> PlannedRun:
        """The run with the first value of an option with which it fits; else with the last.

        values: each needs less memory than the one before it.
        """

        def planned(value: Any) -> PlannedRun:
            return self.planned(**changes | {option: value})

        def needed(value: Any) -> float:
            return planned(value).needed_with_margin

        return planned(first_that_fits(values, needed, self.gpus.bytes, falls=True))


def _shared(config: TrainConfig, size: int) -> dict[str, Any]:
    """The options with which `size` ranks share each micro-batch, with the same rows per step."""
    # Ranks that share rows are one reader of the data: there are fewer readers, so each takes more.
    return {
        "context_parallel_size": size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps * size,
    }


def _by_speed(runs: Iterable[PlannedRun]) -> list[PlannedRun]:
    """Sort: runs that fit with a margin, the fastest first; then the others by needed memory.

    Those with activations in host memory are left out if they are not worth it, unless all are
    such: then that is asked for.
    """

    def order(run: PlannedRun) -> tuple[int, float]:
        return (0, -run.tokens_per_second) if run.fits_with_margin else (1, run.needed)

    runs = sorted(runs, key=order)
    fastest = next((run for run in runs if not run.moves_activations), None)
    if fastest is None:
        return runs
    return [run for run in runs if not run.moves_activations or _is_worth_it(run, fastest)]


def _is_worth_it(moving: PlannedRun, fastest: PlannedRun) -> bool:
    """Whether a run may keep activations in host memory, beside the fastest one that does not."""
    if not (moving.fits_with_margin and moving.leaves_host_memory):
        return False
    is_faster = moving.tokens_per_second > WORTH * fastest.tokens_per_second
    return is_faster or not fastest.fits_with_margin
