"""Compares what an adapter may be merged into with the model that was trained: its quantized base and the adapter."""

import dataclasses
import logging
import math
import sys
import tempfile
from typing import IO, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from tqdm import tqdm

from fsdp_qlora import models
from fsdp_qlora.commands.merge import Merge
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.data.batches import IGNORE_INDEX
from fsdp_qlora.data.prepare import DataOptions, prepare_rows
from fsdp_qlora.distributed import Ranks
from fsdp_qlora.merging.blockwise import predictions
from fsdp_qlora.merging.merged_model import MergedModel
from fsdp_qlora.models import find_blocks, has_tied_embeddings

log = logging.getLogger("fsdp_qlora")

_MOST_LOGITS = 2**28  # of which the probabilities are compared; they wait in a temporary file


class VerifyRow(NamedTuple):
    """A row's tokens, int64 [T], and which token is to be predicted at each place, -100 for none."""

    ids: torch.Tensor
    targets: torch.Tensor


class Result(NamedTuple):
    """losses: of each row, summed over its target tokens, in nats. divergence: KL(trained || this) per token."""

    losses: np.ndarray
    divergence: float


def read_rows(config: TrainConfig, merge: Merge, rows_file: str, limit: int) -> list[VerifyRow]:
    """Rows as the run would have trained on them.

    Raises:
        UserError: they cannot be read or used.
    """
    folder = merge.adapter.path if (merge.adapter.path / "tokenizer_config.json").is_file() else merge.folder
    tokenizer = models.load_tokenizer(folder, str(folder), trust_remote_code=config.trust_remote_code)
    options = dataclasses.replace(config.pick(DataOptions), dataset=(rows_file,), dataset_samples=limit)
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
    model = models.build_meta_model(
        merge.config,
        attn_implementation="auto",
        dtype=torch.float32,
        compute_dtype=torch.float32,
        device=ranks.device,
        experts_implementation="eager",
        trust_remote_code=merge.trained_on.trust_remote_code,
    )
    if merged.copies and has_tied_embeddings(model):
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
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
