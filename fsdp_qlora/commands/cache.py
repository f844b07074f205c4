"""The command `cache`: lists and prunes the cache of quantized weights."""

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.text import format_bytes


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--list", action="store_true", help="show the entries and their sizes (the default)")
    parser.add_argument("--json", action="store_true", help="show them for programs")
    parser.add_argument("--prune", nargs="+", metavar="KEY", help="remove entries: their keys, or all")
    parser.add_argument("--quant_cache", metavar="DIR", default="auto", help="the cache's folder, as in training")


def run(args: argparse.Namespace) -> None:
    """List and prune what --quant_cache of training keeps."""
    from fsdp_qlora.sharding.loading.quant_cache import cache_root

    root = cache_root(args.quant_cache)
    if root is None:
        raise UserError("--quant_cache off has nothing to list or prune. Give its folder, or leave it out.")
    if args.prune:
        prune(root, args.prune)
        return
    entries = list_entries(root)
    if args.json:
        print(json.dumps({"folder": str(root), "entries": entries}, indent=2))
        return
    for entry in entries:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry["used"]))
        label = entry["model"] if entry["state"] == "complete" else entry["state"]
        print(f"{entry['key']}  {format_bytes(entry['bytes']):>11}  used {used}  {entry['quantizer']}  {label}")
    print(f"{root}: {len(entries)} entries, {format_bytes(sum(entry['bytes'] for entry in entries))}")


def list_entries(root: Path) -> list[dict[str, Any]]:
    """The entries of the cache, most recently used first."""
    from fsdp_qlora.sharding.loading.quant_cache import CHECKSUMS, read_description

    folders = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    entries = []
    for folder in folders:
        description: dict[str, Any] = {}
        state = folder.suffix.removeprefix(".") or "complete"
        if state == "complete":
            try:
                description = read_description(folder)
            except (OSError, ValueError, KeyError, RecursionError):
                state = "damaged"
        size = sum(path.stat().st_size for path in folder.iterdir())
        used = folder / CHECKSUMS if (folder / CHECKSUMS).is_file() else folder
        described = {name: description.get(name, "") for name in ("quantizer", "model", "created")}
        entries.append({"key": folder.stem, "state": state, "bytes": size, "used": used.stat().st_mtime, **described})
    return sorted(entries, key=lambda entry: -entry["used"])


def prune(root: Path, keys: list[str]) -> None:
    """Remove entries and leftovers of damaged ones, except those that a run is writing.

    Raises:
        UserError: a key is not in the cache.
    """
    from fsdp_qlora.sharding.loading.quant_cache import try_lock

    present = {entry["key"] for entry in list_entries(root)}
    chosen = present if keys == ["all"] else set(keys)
    if unknown := chosen - present:
        raise UserError(f"The cache {root} has no entry {', '.join(sorted(unknown))}. See: fsdp-qlora cache")
    freed = 0
    for key in sorted(chosen):
        lock = try_lock(root / key)
        if lock is None:
            print(f"{key} is being written by a run: not removed.")
            continue
        for folder in [root / key, *root.glob(f"{key}.*")]:
            if folder.is_dir():
                freed += sum(path.stat().st_size for path in folder.iterdir())
                shutil.rmtree(folder)
        (root / f"{key}.lock").unlink(missing_ok=True)
        lock.release()
    print(f"Freed {format_bytes(freed)}.")
