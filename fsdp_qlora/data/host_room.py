"""Compares the free memory of the host with what it takes to tokenize a dataset."""

from fsdp_qlora.utils.machine import host_memory_free
from fsdp_qlora.utils.text import format_bytes, plural, warn_from_any_rank

# Beside the libraries, which are in memory by now: the rows of a piece as text and as tokens.
_OF_A_PIECE = 70 * 2**20  # bytes
_OF_A_WORKER = 41 * 2**20


def warn_of_little_memory(num_workers: int) -> None:
    """Say in one line if the free memory may not suffice to tokenize rows.

    Args:
        num_workers: the processes that may be started to fill the chat template.
    """
    needed = _OF_A_PIECE + num_workers * _OF_A_WORKER
    free = host_memory_free(1)  # the other ranks of the machine wait meanwhile
    if needed <= free:
        return
    processes = plural(num_workers, "process", ending="es")
    of_workers = f" with {processes} for the chat template" if num_workers else ""
    warn_from_any_rank(
        f"Tokenizing takes about {format_bytes(needed)} of host memory{of_workers}, and "
        f"{format_bytes(free)} are free. If the system ends the program, give it more memory and "
        "start again: it goes on behind the pieces that are kept."
    )
