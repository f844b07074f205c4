"""Compares what an adapter may be merged into with the model that was trained: its quantized base and the adapter."""

import dataclasses
import logging
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from accelerate.hooks import attach_align_device_hook
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from fsdp_qlora.data.batches.micro_batch import pad_rows
from fsdp_qlora.data.run_data import prepare_rows, record_of
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.export.merge import Merge, MergedModel
from fsdp_qlora.export.model_folder import build_plain_model
from fsdp_qlora.export.rounded import RoundedModel
from fsdp_qlora.model.architecture import models
from fsdp_qlora.model.architecture.models import canonical_name, has_tied_embeddings
from fsdp_qlora.planning.run_plan import data_options
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import read_json
from fsdp_qlora.utils.run_files import RECORD

log = logging.getLogger("fsdp_qlora")

_MOST_TOKENS = 2**14  # that pass through a model at a time: all its weights are read for them
_MOST_LOGITS = 2**27  # of each model in memory


class VerifyRow(NamedTuple):
    """A row's tokens, int64 [T], and the places, int64 [N], from which targets, int64 [N], are predicted."""

    ids: torch.Tensor
    places: torch.Tensor
    targets: torch.Tensor


class Result(NamedTuple):
    """losses: of each row, summed over its target tokens, in nats. divergence: KL(trained || this) per token."""

    losses: np.ndarray
    divergence: float


def read_rows(merge: Merge, rows_file: str, limit: int) -> list[VerifyRow]:
    """Read rows as the run would have trained on them, the shortest first."""
    folder = merge.adapter.path if (merge.adapter.path / "tokenizer_config.json").is_file() else merge.folder
    tokenizer = models.load_tokenizer(folder, str(folder), trust_remote_code=merge.run.trust_remote_code)
    length = merge.run.context_length
    if length == "auto":  # a row as long as it may be: few rows would decide otherwise than those of the training
        length = models.at_most_positions(merge.config, merge.run.longest_row)
    run = dataclasses.replace(merge.run, dataset=(rows_file,), dataset_samples=limit, context_length=length)
    run = dataclasses.replace(run, resume="off", adapter=str(merge.adapter.path))
    options = data_options(run, merge.folder, tokenizer)
    rows, report, prompts = prepare_rows(tokenizer, options)
    if prompts:
        raise UserError(f"--verify compares losses of answers, and --objective {run.objective} has prompts alone.")
    noted = read_json(merge.adapter.path / RECORD).get("prompt")
    if noted and noted != record_of(report, options):
        log.warning("The prompts of %s are not in the format of the training: see --prompt_template.", rows_file)
    batches = [pad_rows(rows, [row], pad_token_id=0) for row in np.argsort(rows.lengths, kind="stable")]
    return [VerifyRow(batch.input_ids[0], batch.target_rows, batch.targets) for batch in batches]


def compare(merge: Merge, rows: list[VerifyRow], ranks: Ranks, mesh: DeviceMesh, dtype: torch.dtype | None) -> str:
    """Print loss and divergence of both bases; returns the better one."""
    if not merge.layers:
        log.info("The adapter's base was not quantized, so there is nothing to compare: the original base is right.")
        return "original"
    bases = ["dequantized"] if merge.original.weights.packed else ["original", "dequantized"]
    merged = {"trained": merge.on("dequantized", ranks, mesh, torch.float32)}
    merged |= {base: merge.on(base, ranks, mesh, dtype) for base in bases}
    with tqdm(desc="Comparing", unit=" weights", disable=not sys.stderr.isatty()) as bar:
        results = _evaluate(merge, merged, rows, ranks, bar.update)
    better = min(bases, key=lambda base: _order(results, base))
    for line in _describe(results, rows, better):
        log.info(line)
    return better


def compare_written(merge: Merge, written: RoundedModel, rows: list[VerifyRow], ranks: Ranks) -> None:
    """Print loss and divergence of a model that was written in its base's format."""
    assert merge.stored is not None
    models = {"trained": dataclasses.replace(merge.original, dtype=torch.float32), merge.stored.name: written}
    for line in _describe(_evaluate(merge, models, rows, ranks, lambda: None), rows, merge.stored.name):
        log.info(line)


@torch.no_grad()
def _evaluate(
    merge: Merge, merged: Mapping[str, MergedModel], rows: list[VerifyRow], ranks: Ranks, done: Callable[[], object]
) -> dict[str, Result]:
    """The results of the models, the first of which is the trained one. done: called when a weight was used."""
    losses: dict[str, list[float]] = {name: [] for name in merged}
    divergences, count = dict.fromkeys(merged, 0.0), 0
    predictions = [_predict(merge, model, [row.ids for row in rows], ranks, done) for model in merged.values()]
    for row, *logits in zip(rows, *predictions, strict=True):
        chosen, targets = row.places.to(ranks.device), row.targets.to(ranks.device)
        trained, *_ = logps = [one[chosen].log_softmax(dim=-1) for one in logits]
        count += len(chosen)
        for name, one in zip(merged, logps, strict=True):
            losses[name].append(F.nll_loss(one, targets, reduction="sum").item())
            divergences[name] += F.kl_div(one, trained, log_target=True, reduction="sum").item()
    return {name: Result(np.array(losses[name]), divergences[name] / max(count, 1)) for name in merged}


def _order(results: dict[str, Result], base: str) -> tuple[float, float]:
    """Lower is better: the loss, unless it differs by no more than chance; then the divergence."""
    losses = [result.losses for name, result in results.items() if name != "trained"]
    differences = losses[0] - losses[-1]
    error = differences.std() * math.sqrt(len(differences))
    is_chance = abs(differences.sum()) <= 2 * error
    return (0.0 if is_chance else float(results[base].losses.sum()), results[base].divergence)


def _describe(results: dict[str, Result], rows: list[VerifyRow], better: str) -> list[str]:
    targets = sum(len(row.targets) for row in rows)
    lines = [f"Compared on {len(rows)} rows, {targets:,} target tokens (loss and divergence in nats per token):"]
    for name, result in results.items():
        title = "trained (quantized base + adapter)" if name == "trained" else f"merged into the {name} base"
        divergence = "" if name == "trained" else f", divergence from the trained model {result.divergence:.2e}"
        lines.append(f"  {title}: loss {result.losses.sum() / targets:.5f}{divergence}")
    losses = {name: result.losses.sum() for name, result in results.items() if name != "trained"}
    differs = better == min(losses, key=lambda name: losses[name]) and len(set(losses.values())) > 1
    why = "its loss is lower" if differs else "the losses differ by chance, and it is nearer to what was trained"
    return [*lines, f"  Recommended: --base {better} ({why})."] if len(losses) > 1 else lines


class _Weights(dict[str, torch.Tensor]):
    """Name of a model's parameter -> its value, read whenever it is asked for."""

    def __init__(self, read: Callable[[str], torch.Tensor]) -> None:
        self._read = read

    def __missing__(self, name: str) -> torch.Tensor:
        return self._read(name)


def _predict(
    merge: Merge, merged: MergedModel, rows: Sequence[torch.Tensor], ranks: Ranks, done: Callable[[], object]
) -> Iterator[torch.Tensor]:
    """The logits of each row, float32 [T, vocabulary]; one module's weights are in memory at a time.

    The decoder runs on many rows at once, the head on as many as there is room for logits.
    rows: token ids, int64 [T], the shortest first.
    """
    trust = merge.run.trust_remote_code
    model: Any = build_plain_model(merge.config, torch.float32, ranks.device, trust_remote_code=trust).eval()
    head = model.get_output_embeddings()
    if merged.copies and has_tied_embeddings(model):
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    first: dict[int, str] = {}  # a parameter that two modules share is read by its first name
    names = {
        name: first.setdefault(id(parameter), canonical_name(name))
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }

    def read(name: str) -> torch.Tensor:
        done()
        return merged.whole(names[name])

    attach_align_device_hook(model, execution_device=ranks.device, offload=True, weights_map=_Weights(read))
    decoder = model.base_model
    forward = decoder.forward
    for batch in _batches(rows, _MOST_TOKENS):
        output = forward(input_ids=pad_sequence(batch, batch_first=True).to(ranks.device), use_cache=False)
        states = iter(output.last_hidden_state)
        for part in _batches(batch, _MOST_LOGITS // head.weight.shape[0]):
            ids = pad_sequence(part, batch_first=True)
            hidden = torch.stack([next(states)[: ids.shape[1]] for _ in part])
            decoder.forward = lambda hidden=hidden, output=output, **_: type(output)(last_hidden_state=hidden)
            logits = model(input_ids=ids.to(ranks.device), use_cache=False).logits.float()
            yield from (row[: len(row_ids)] for row, row_ids in zip(logits, part, strict=True))


def _batches(rows: Sequence[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    """Rows, the shortest first, in lists that padded have at most this many tokens, or a single row."""
    batch: list[torch.Tensor] = []
    for row in rows:
        if batch and (len(batch) + 1) * len(row) > most:
            yield batch
            batch = []
        batch.append(row)
    yield batch
