"""Imports what a rank needs, once, in the server process that forks the ranks."""

from fsdp_qlora.run.run import run

__all__ = ["run"]
