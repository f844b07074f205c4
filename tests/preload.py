"""Imports what a rank needs, once, in the server process that forks the ranks."""

import importlib

for name in ("describe", "export", "parallelize", "trainer", "verify", "weights"):
    importlib.import_module(f"fsdp_qlora.{name}")
