"""The command `cache`: lists and prunes the cache of quantized weights."""

import argparse
import json
import time

from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.text import format_bytes


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--list", action="store_true", help="show the entries and their sizes (the default)")
    parser.add_argument("--json", action="store_true", help="show them for programs")
    parser.add_argument("--prune", nargs="+", metavar="KEY", help="remove entries: their keys, or all")
    parser.add_argument("--quant_cache", metavar="DIR", default="auto", help="the cache's folder, as in training")


def run(args: argparse.Namespace) -> None:
    """List and prune what --quant_cache of training keeps."""
    from fsdp_qlora.sharding.loading.quant_cache import cache_root, list_entries, prune

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
