"""`fsdp-qlora cache`."""

import argparse

from fsdp_qlora.commands.cache import prune, show_entries
from fsdp_qlora.errors import UserError
from fsdp_qlora.quant_cache.folders import cache_root

DESCRIPTION = "List and prune what --quant_cache of training keeps."


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--list", action="store_true", help="show the entries and their sizes (the default)")
    parser.add_argument("--json", action="store_true", help="show them for programs")
    parser.add_argument("--prune", nargs="+", metavar="KEY", help="remove entries: their keys, or all")
    parser.add_argument("--quant_cache", metavar="DIR", default="auto", help="the cache's folder, as in training")


def run(args: argparse.Namespace) -> None:
    root = cache_root(args.quant_cache)
    if root is None:
        raise UserError("--quant_cache off has nothing to list or prune. Give its folder, or leave it out.")
    if args.prune:
        prune(root, args.prune)
    else:
        show_entries(root, as_json=args.json)
