"""Compares what an adapter may be merged into with the model that was trained: its quantized base and the adapter.

A model computes its predictions with one decoder block in memory at a time, for all rows.
"""

import contextlib
import dataclasses
import logging
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from tqdm import tqdm
from transformers import PreTrainedModel

from fsdp_qlora.commands.merge import Merge
from fsdp_qlora.commands.merging import MergedModel
from fsdp_qlora.commands.model_folder import build_plain_model
from fsdp_qlora.data.batches import IGNORE_INDEX
from fsdp_qlora.data.prepare import DataOptions, prepare_rows
from fsdp_qlora.model import models
from fsdp_qlora.model.models import canonical_name, find_blocks, has_tied_embeddings
from fsdp_qlora.ranks.distributed import Ranks

log = logging.getLogger("fsdp_qlora")

_MOST_LOGITS = 2**28  # whose probabilities are compared; they are kept in a temporary file


class VerifyRow(NamedTuple):
    """A row's tokens, int64 [T], and which token is to be predicted at each place, -100 for none."""

    ids: torch.Tensor
    targets: torch.Tensor


class Result(NamedTuple):
    """losses: of each row, summed over its target tokens, in nats. divergence: KL(trained || this) per token."""

    losses: np.ndarray
    divergence: float


def read_rows(merge: Merge, rows_file: str, limit: int) -> list[VerifyRow]:
    """Rows as the run would have trained on them.

    Raises:
        UserError: they cannot be read or used.
    """
    folder = merge.adapter.path if (merge.adapter.path / "tokenizer_config.json").is_file() else merge.folder
    tokenizer = models.load_tokenizer(folder, str(folder), trust_remote_code=merge.run.trust_remote_code)
    options = dataclasses.replace(merge.run.pick(DataOptions), dataset=(rows_file,), dataset_samples=limit)
    rows, _ = prepare_rows(tokenizer, options, show_progress=True)
    found = []
    for start, end in zip(rows.offsets[:-1], rows.offsets[1:], strict=True):
        ids = torch.from_numpy(rows.input_ids[start:end].astype(np.int64))
        learned = torch.from_numpy(rows.learned[start:end].copy())
        found.append(VerifyRow(ids, torch.where(learned, ids, IGNORE_INDEX)[1:]))
    return found


def compare(merge: Merge, rows: list[VerifyRow], ranks: Ranks, mesh: DeviceMesh, dtype: torch.dtype | None) -> str:
    """Print loss and divergence of both bases; returns the better one."""
    if not merge.layers:
        log.info("The adapter's base was not quantized, so there is nothing to compare: the original base is right.")
        return "original"
    trained = merge.on("dequantized", ranks, mesh, torch.float32)
    bases = ["dequantized"] if merge.original.weights.packed else ["original", "dequantized"]
    with tempfile.TemporaryFile() as file:
        reference = _Reference(file)
        results = {"trained": _evaluate(merge, trained, rows, ranks, reference, "Trained model")}
        for base in bases:
            merged = merge.on(base, ranks, mesh, dtype)
            results[base] = _evaluate(merge, merged, rows, ranks, reference.reread(), f"{base.capitalize()} base")
    better = min(bases, key=lambda base: _order(results, base))
    for line in _describe(results, rows, better):
        log.info(line)
    return better


class _Reference:
    """The trained model's log-probabilities, as far as there is room for them, in a file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.room, self.writes = file, _MOST_LOGITS, True

    def reread(self) -> "_Reference":
        self._file.seek(0)
        again = _Reference(self._file)
        again.writes = False
        return again

    def divergence(self, log_probabilities: torch.Tensor) -> tuple[float, int]:
        """The divergence from the trained model's next predictions, summed, and their number."""
        count = min(len(log_probabilities), self.room // log_probabilities.shape[1])
        mine = log_probabilities[:count].cpu().contiguous()
        self.room -= mine.numel()
        if self.writes:
            self._file.write(memoryview(mine.numpy()).cast("B"))  # type: ignore[arg-type]
            return 0.0, count
        stored = torch.frombuffer(bytearray(self._file.read(mine.nbytes)), dtype=torch.float32) if count else mine
        return F.kl_div(mine, stored.view(mine.shape), log_target=True, reduction="sum").item(), count


def _evaluate(
    merge: Merge, merged: MergedModel, rows: list[VerifyRow], ranks: Ranks, reference: _Reference, title: str
) -> Result:
    with_code = merge.run.trust_remote_code
    model = build_plain_model(merge.config, torch.float32, ranks.device, trust_remote_code=with_code)
    if merged.copies and has_tied_embeddings(model):
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    losses, total, count = [], 0.0, 0
    hidden = not sys.stderr.isatty()
    with tqdm(total=len(find_blocks(model)), desc=title, unit=" blocks", disable=hidden) as bar:
        for row, logits in zip(
            rows, predictions(model, merged.whole, [row.ids for row in rows], ranks.device, bar.update), strict=True
        ):
            chosen = (row.targets != IGNORE_INDEX).nonzero().flatten().to(ranks.device)
            found = logits[chosen].log_softmax(dim=-1)
            targets = row.targets[chosen.cpu()].to(ranks.device)
            losses.append(F.nll_loss(found, targets, reduction="sum").item())
            divergence, number = reference.divergence(found)
            total, count = total + divergence, count + number
    return Result(np.array(losses), total / max(count, 1))


def _order(results: dict[str, Result], base: str) -> tuple[float, float]:
    """Lower is better: the loss, unless it differs by no more than chance; then the divergence."""
    losses = [result.losses for name, result in results.items() if name != "trained"]
    differences = losses[0] - losses[-1]
    error = differences.std() * math.sqrt(len(differences))
    is_chance = abs(differences.sum()) <= 2 * error
    return (0.0 if is_chance else float(results[base].losses.sum()), results[base].divergence)


def _describe(results: dict[str, Result], rows: list[VerifyRow], better: str) -> list[str]:
    targets = sum(int((row.targets != IGNORE_INDEX).sum()) for row in rows)
    lines = [f"Compared on {len(rows)} rows, {targets:,} target tokens (loss and divergence in nats per token):"]
    for name, result in results.items():
        title = "trained (quantized base + adapter)" if name == "trained" else f"merged into the {name} base"
        divergence = "" if name == "trained" else f", divergence from the trained model {result.divergence:.2e}"
        lines.append(f"  {title}: loss {result.losses.sum() / targets:.5f}{divergence}")
    losses = {name: result.losses.sum() for name, result in results.items() if name != "trained"}
    differs = better == min(losses, key=lambda name: losses[name]) and len(set(losses.values())) > 1
    why = "its loss is lower" if differs else "the losses differ by chance, and it is nearer to what was trained"
    return [*lines, f"  Recommended: --base {better} ({why})."] if len(losses) > 1 else lines


@torch.no_grad()
def predictions(
    model: PreTrainedModel,
    read: Callable[[str], torch.Tensor],
    rows: Sequence[torch.Tensor],
    device: torch.device,
    done: Callable[[], object],
) -> Iterator[torch.Tensor]:
    """The logits of each row, float32 [T, vocabulary].

    First the whole model runs with blocks that only note their arguments. Then each block is loaded and runs on all
    rows. At last the model runs again, from what the last block returned.

    Args:
        model: on the meta device; its parameters come and go.
        read: name of a parameter -> its value, on the CPU.
        rows: token ids, int64 [T].
        done: called when a block is done.
    """
    blocks = list(find_blocks(model))
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    inside = {id(module) for block in blocks for module in block.modules()}
    ends = {id(embeddings), id(head)}
    rest = [module for module in model.modules() if id(module) not in inside | ends]
    names = {id(parameter): canonical_name(name) for name, parameter in model.named_parameters()}

    def load(modules: Sequence[nn.Module]) -> None:
        _load(modules, names, read, device)

    model.eval()
    load(rest)
    load([embeddings])
    hidden, arguments = [], []
    with _instead(head, lambda states: states[..., :1]):
        for row in rows:
            states, calls = _run_noting(model, blocks, row[None].to(device))
            hidden.append(states)
            arguments.append(calls)
    _free(embeddings, names)
    for number, block in enumerate(blocks):
        load(list(block.modules()))
        for index, calls in enumerate(arguments):
            args, kwargs = calls[number]
            output = block(hidden[index], *args, **kwargs)
            hidden[index] = output[0] if isinstance(output, tuple) else output
            calls[number] = ((), {})
        _free(block, names)
        done()
    load([head])
    for row, states in zip(rows, hidden, strict=True):
        with _returning(blocks, states), _returning([embeddings], states):
            yield model(input_ids=row[None].to(device), use_cache=False).logits[0].float()
    for module in (head, *rest):
        _free(module, names, recurse=False)


def _load(
    modules: Sequence[nn.Module], names: dict[int, str], read: Callable[[str], torch.Tensor], device: torch.device
) -> None:
    """Fill the modules' own parameters, and move their buffers, which hold their values already."""
    for module in modules:
        for key, parameter in list(module.named_parameters(recurse=False)):
            name = names[id(parameter)]
            value = nn.Parameter(read(name).to(device, parameter.dtype), requires_grad=False)
            names[id(value)] = name
            setattr(module, key, value)
        for key, buffer in module.named_buffers(recurse=False):
            module._buffers[key] = buffer.to(device)


def _free(module: nn.Module, names: dict[int, str], *, recurse: bool = True) -> None:
    for part in module.modules() if recurse else [module]:
        for key, parameter in list(part.named_parameters(recurse=False)):
            empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
            names[id(empty)] = names[id(parameter)]
            setattr(part, key, empty)


def _run_noting(
    model: PreTrainedModel, blocks: Sequence[nn.Module], ids: torch.Tensor
) -> tuple[torch.Tensor, list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    """The states that enter the first block, and each block's other arguments."""
    states: list[torch.Tensor] = []
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        states.append(hidden)
        calls.append((args, kwargs))
        return hidden

    with contextlib.ExitStack() as stack:
        for block in blocks:
            stack.enter_context(_instead(block, note))
        model(input_ids=ids, use_cache=False)
    return states[0], calls


@contextlib.contextmanager
def _returning(blocks: Sequence[nn.Module], states: torch.Tensor) -> Iterator[None]:
    """Let every one of these modules return these states."""
    with contextlib.ExitStack() as stack:
        for block in blocks:
            stack.enter_context(_instead(block, lambda *args, **kwargs: states))
        yield


@contextlib.contextmanager
def _instead(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module compute something else. Its other attributes, which the model's loop reads, stay."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
