"""`python -m fsdp_qlora quantize`: a model saved in 4 bits ahead of time, and what the cache holds."""

import argparse
import json
import logging
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel

from fsdp_qlora import models
from fsdp_qlora.commands.model_folder import new_folder
from fsdp_qlora.errors import UserError
from fsdp_qlora.loading import hub
from fsdp_qlora.loading.decoded import take_format
from fsdp_qlora.loading.load_weights import match_tensors, quantized_layers
from fsdp_qlora.loading.weight_files import Part, WeightFiles, Weights, open_weight_files, read_ahead
from fsdp_qlora.quant_cache.entries import cache_root, last_used, read_about
from fsdp_qlora.quant_cache.writer import hold
from fsdp_qlora.quantizers.base import packed_forms
from fsdp_qlora.quantizers.bnb_4bit import Bnb4bitExperts, Bnb4bitWeight, quantize_blocks
from fsdp_qlora.quantizers.bnb_4bit_format import EXPERTS_KEY, take_settings
from fsdp_qlora.quantizers.experts import quantizable_weights
from fsdp_qlora.quantizers.table import quantize_experts, quantize_linears
from fsdp_qlora.storage.safetensors_files import PackedFiles, TensorForm
from fsdp_qlora.units import format_bytes

log = logging.getLogger("fsdp_qlora")

_PIECE_BYTES = 64 * 2**20  # of a tensor, in memory at a time; whole blocks in any type


def main(argv: list[str]) -> int:
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    root = cache_root(args.quant_cache)
    if root is None:
        raise UserError("--quant_cache off has nothing to list or prune. Give its folder, or leave it out.")
    if args.list:
        show_entries(root, as_json=args.json)
    elif args.prune:
        prune(root, args.prune)
    elif args.model and args.out:
        quantize_model(
            args.model,
            Path(args.out),
            quant_type=args.quant_type,
            double_quant=args.double_quant == "true",
            trust_remote_code=args.trust_remote_code == "true",
        )
    else:
        raise UserError("Give MODEL and --out DIR, or --list, or --prune. See --help.")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp_qlora quantize",
        description="Save a model in bitsandbytes' 4-bit format, as a folder that train.py and transformers load, "
        "with or without a GPU and a piece of a tensor in memory at a time (a mixture of experts is loaded by train.py "
        "only: bitsandbytes has no format for experts). Or list and prune what --quant_cache keeps.",
    )
    parser.add_argument("model", nargs="?", help="name on the Hugging Face hub, or local folder")
    parser.add_argument("--out", metavar="DIR", help="folder to make")
    parser.add_argument("--quant_type", choices=["nf4", "fp4"], default="nf4", help="4-bit format (default: nf4)")
    parser.add_argument(
        "--double_quant", choices=["true", "false"], default="true", help="quantize the scales too (default: true)"
    )
    parser.add_argument(
        "--trust_remote_code", choices=["true", "false"], default="false", help="as in train.py (default: false)"
    )
    parser.add_argument("--list", action="store_true", help="show the cache's entries and their sizes")
    parser.add_argument("--json", action="store_true", help="with --list: for programs")
    parser.add_argument("--prune", nargs="+", metavar="KEY", help="remove entries of the cache: their keys, or all")
    parser.add_argument("--quant_cache", metavar="DIR", default="auto", help="the cache's folder, as in train.py")
    return parser


# ---- a model in 4 bits -----------------------------------------------------------------------------------


def quantize_model(
    model_name: str, out: Path, *, quant_type: str, double_quant: bool, trust_remote_code: bool = False
) -> None:
    """Write a model folder in 4 bits: what a run with train type qlora would quantize.

    Raises:
        UserError: the model cannot be read or is quantized already, or `out` cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} is there already and not empty. Give another folder.")
    folder = hub.find_model_folder(model_name, with_weights=True, with_code=trust_remote_code)
    config = models.load_config(folder, model_name, trust_remote_code=trust_remote_code)
    stored = take_format(config)
    if stored:
        log.info(stored.describe_use(quantizes=True))
    weight_files = open_weight_files(folder, stored)
    model = _meta_model(
        config, model_name, quant_type=quant_type, double_quant=double_quant, trust_remote_code=trust_remote_code
    )
    weights = match_tensors(model, weight_files)
    with new_folder(out, "--out") as partial:
        _write_weights(partial, model, weights)
        _write_description(folder, partial, model, quant_type=quant_type, double_quant=double_quant)
    size = sum(path.stat().st_size for path in out.iterdir())
    log.info("Saved: %s (%s)", out, format_bytes(size))


def _meta_model(
    config: PretrainedConfig, name: str, *, quant_type: str, double_quant: bool, trust_remote_code: bool
) -> PreTrainedModel:
    if take_settings(config, name):
        raise UserError(f"model_name {name} is quantized to 4 bits already; train.py takes it as it is.")
    model = models.build_meta_model(
        config,
        attn_implementation="auto",
        dtype=torch.bfloat16,
        compute_dtype=torch.bfloat16,
        device=torch.device("cpu"),
        trust_remote_code=trust_remote_code,
    )
    linears, experts = quantizable_weights(model)
    options = {"quant_type": quant_type, "double_quant": double_quant, "compute_dtype": torch.bfloat16}
    quantize_linears(model, linears, "bnb_4bit", **options)
    if quantize_experts(model, experts, "bnb_4bit", **options):
        log.info(
            "The experts are in 4 bits too, for which bitsandbytes has no format: train.py loads what is saved here, "
            "transformers does not."
        )
    return model


def _write_weights(folder: Path, model: PreTrainedModel, weights: Weights) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    layers = {name: layer for name, layer in quantized_layers(model).items() if isinstance(layer, Bnb4bitWeight)}
    forms: dict[str, TensorForm] = {}
    for name, source in weights.sources.items():
        copied = {name: TensorForm(weights.files.dtype(source), tuple(weights.files.shape(source)))}
        forms |= packed_forms(name, layers[name]) if name in layers else copied
    files = PackedFiles(folder, forms)
    free = shutil.disk_usage(folder).free
    if free < files.num_bytes:
        raise UserError(f"{folder.parent} has {format_bytes(free)} free, {format_bytes(files.num_bytes)} are needed.")
    files.create()
    jobs = [(name, part) for name, source in weights.sources.items() for part in _pieces(weights.files, source)]
    total = sum((part.stop - part.start) * weights.files.dtype(part.name).itemsize for _, part in jobs)
    with tqdm(total=total, unit="B", unit_scale=True, desc="Quantizing", disable=not sys.stderr.isatty()) as bar:
        contents = read_ahead(weights.files, [part for _, part in jobs], max_bytes=2 * _PIECE_BYTES)
        absmax: list[torch.Tensor] = []  # of the pieces of the weight so far
        for (name, part), content in zip(jobs, contents, strict=True):
            bar.update(content.nbytes)
            if name not in layers:
                files.write(name, part.start * content.element_size(), content)
                continue
            absmax.append(_write_codes(files, name, layers[name], part.start, content.to(device)))
            if part.stop == weights.files.shape(part.name).numel():
                _write_statistics(files, name, layers[name], torch.cat(absmax), content.dtype)
                absmax.clear()
    files.sync()
    files.close()


def _pieces(weight_files: WeightFiles, source: str) -> Iterator[Part]:
    count = weight_files.shape(source).numel()
    size = _PIECE_BYTES // weight_files.dtype(source).itemsize
    for start in range(0, count, size):
        yield Part(source, start, min(start + size, count))


def _write_codes(
    files: PackedFiles, weight: str, layer: Bnb4bitWeight, start: int, values: torch.Tensor
) -> torch.Tensor:
    """Quantize and write the elements from `start` on; returns their blocks' absmax."""
    if not values.isfinite().all():
        raise UserError(f"Weight {weight} has values that are not finite (NaN or infinity). Download the model again.")
    codes, absmax = quantize_blocks(values, layer.format.quant_type)
    files.write(weight, start // 2, codes.cpu())
    return absmax


def _write_statistics(
    files: PackedFiles, weight: str, layer: Bnb4bitWeight, absmax: torch.Tensor, dtype: torch.dtype
) -> None:
    """Write all that belongs to a quantized weight but its codes. dtype: of the weight before."""
    contents = {"absmax": absmax}
    if layer.double_quant:
        contents["absmax"], contents["nested_absmax"] = layer.quantize_absmax(absmax)
    for suffix, stored in layer.stored_parameters().items():
        if stored.parameter in contents:
            files.write(weight + suffix, 0, contents[stored.parameter].cpu())
    for suffix, whole in layer.stored_whole(dtype).items():
        files.write(weight + suffix, 0, whole)


def _write_description(
    source: Path, folder: Path, model: PreTrainedModel, *, quant_type: str, double_quant: bool
) -> None:
    """The tokenizer's and other small files as they are, and config.json with the quantization in it."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    patterns = [*hub.SMALL_FILES, *["*.py"] * ("auto_map" in config)]
    for path in {path for pattern in patterns for path in source.glob(pattern)}:
        if path.is_file() and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=double_quant,
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=[name for name, module in model.named_modules() if isinstance(module, nn.Linear)],
    )
    has_experts = any(isinstance(module, Bnb4bitExperts) for module in model.modules())
    config["quantization_config"] = quantization.to_dict() | ({EXPERTS_KEY: True} if has_experts else {})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


# ---- the cache -------------------------------------------------------------------------------------------


def list_entries(root: Path) -> list[dict[str, Any]]:
    """What the cache holds, last used first."""
    folders = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    entries = []
    for folder in folders:
        about: dict[str, Any] = {}
        state = folder.suffix.removeprefix(".") or "complete"
        if state == "complete":
            try:
                about = read_about(folder)
            except (OSError, ValueError, KeyError):
                state = "damaged"
        size = sum(path.stat().st_size for path in folder.iterdir())
        described = {name: about.get(name, "") for name in ("quantizer", "model", "created")}
        entries.append({"key": folder.stem, "state": state, "bytes": size, "used": last_used(folder), **described})
    return sorted(entries, key=lambda entry: -entry["used"])


def show_entries(root: Path, *, as_json: bool) -> None:
    entries = list_entries(root)
    if as_json:
        print(json.dumps({"folder": str(root), "entries": entries}, indent=2))
        return
    for entry in entries:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry["used"]))
        about = entry["model"] if entry["state"] == "complete" else entry["state"]
        print(f"{entry['key']}  {format_bytes(entry['bytes']):>11}  used {used}  {entry['quantizer']}  {about}")
    print(f"{root}: {len(entries)} entries, {format_bytes(sum(entry['bytes'] for entry in entries))}")


def prune(root: Path, keys: list[str]) -> None:
    """Remove entries, and what is left of broken ones; not what a run is writing.

    Raises:
        UserError: a key is not in the cache.
    """
    present = {entry["key"] for entry in list_entries(root)}
    chosen = present if keys == ["all"] else set(keys)
    if unknown := chosen - present:
        raise UserError(f"The cache {root} has no entry {', '.join(sorted(unknown))}. See --list.")
    freed = 0
    for key in sorted(chosen):
        lock = hold(root / key)
        if lock is None:
            print(f"{key} is being written by a run: left.")
            continue
        for folder in [root / key, *root.glob(f"{key}.*")]:
            if folder.is_dir():
                freed += sum(path.stat().st_size for path in folder.iterdir())
                shutil.rmtree(folder)
        (root / f"{key}.lock").unlink(missing_ok=True)
        lock.release()
    print(f"Freed {format_bytes(freed)}.")
