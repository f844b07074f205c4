"""How much of an adapter's update is left in merged weights, which are rounded to their type."""

import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence

import torch

from fsdp_qlora.sharding.loading.weight_files import WeightFiles
from fsdp_qlora.utils.errors import UserError

log = logging.getLogger("fsdp_qlora")

# The share of an update below which a merged model is more its base than what was trained.
_FEW = 0.5

# What sums in float32 may be off by, as a share of a weight's largest value.
_OF_SUMS = 1e-6

Piece = tuple[str, int, torch.Tensor, torch.Tensor | None]
"""A piece of a merged weight: the tensor of the files, the element at which it starts, its values,
and the base's values if something is added to them; all flat."""


class Effect:
    """Compares the written weights' difference r from the base with the adapter's update u.

    Both are over all weights that the update is added to.

    share: <r, u> / <u, u>; 0 if there is no update. rest: the length of what rounding adds, which
    is orthogonal to u, divided by the length of u.
    """

    def __init__(self) -> None:
        # <u, u>, <r, u> and <r, r>. In float64: they are sums over billions of weights.
        self._sums = torch.zeros(3, dtype=torch.float64)

    def add(self, base: torch.Tensor, merged: torch.Tensor, written: torch.Tensor) -> None:
        """Add weights of the base, with the update, and as they are written; all flat."""
        # Differences of close values, which 16 bits would round away.
        base = base.float()
        u = merged.float() - base
        r = written.float() - base
        self._sums += torch.stack([u @ u, r @ u, r @ r])

    @property
    def has_update(self) -> bool:
        return float(self._sums[0]) > 0

    @property
    def share(self) -> float:
        of_update, along_update, _ = self._sums.tolist()
        return along_update / (of_update or 1)

    @property
    def rest(self) -> float:
        # Pythagoras: r has a part along u, of the length share * |u|, and the rest. Rounding of the
        # sums may make the difference negative.
        of_update, _, of_difference = self._sums.tolist()
        return math.sqrt(max(of_difference / (of_update or 1) - self.share**2, 0))

    def describe(self, form: str) -> str:
        """One line: what is left of the update. form: to which the weights are rounded."""
        return (
            f"Rounded to {form}: {100 * self.share:.1f}% of the adapter's update is left, and "
            f"rounding adds {self.rest:.2f} times its length."
        )

    def warn(self, form: str, *, advice: str) -> None:
        """Say, before the merged model is published, that it is hardly more than its base.

        form: to which the weights are rounded. advice: how more of the update is kept.
        """
        if not self.has_update:
            log.warning("Warning: the adapter's update is zero, so the merged model is its base.")
        elif self.share < _FEW:
            log.warning(
                "Warning: only %.1f%% of the adapter's update is left after rounding to %s, so the "
                "merged model is nearly its base. %s, or train for longer.",
                100 * self.share,
                form,
                advice,
            )


def check_block(
    files: WeightFiles,
    updated: Sequence[str],
    changed: Callable[[str, torch.dtype], Iterator[Piece]],
) -> None:
    """Compare the last block of a written model with its base and the adapter, and log it.

    They are added once more in float64, and the weights are read back from the files.

    Args:
        updated: the weights that the adapter's update is added to.
        changed: gives the pieces of one of them, added in a dtype.
    Raises:
        UserError: they differ by more than rounding.
    """
    blocks = [re.match(r".*?\.\d+\.", name) for name in updated]
    block = next((found[0] for found in reversed(blocks) if found), "")
    inside = [name for name in updated if name.startswith(block)]
    largest = 0.0
    for name in inside:
        for part, start, exact, base in changed(name, torch.float64):
            if base is None:
                continue
            written = files.read_flat(part, start, start + len(exact))
            rounding = torch.finfo(written.dtype)
            # Half a unit in the last place; near 0 numbers are no nearer to each other.
            allowed = 0.5 * rounding.eps * exact.abs().clamp_min(rounding.smallest_normal)
            allowed = 1.001 * allowed + _OF_SUMS * exact.abs().max()
            difference = (written.double() - exact).abs()
            # Also where a value is no number.
            if not (difference <= allowed).all():
                raise UserError(
                    f"The written {part} is not the base with the adapter: a value differs by "
                    f"{float(difference.max()):.3g}. The result was deleted. Check the disk and "
                    "the memory of this machine, and merge again."
                )
            largest = max(largest, float(difference.max()))
    if inside:
        log.info(
            "Read back: %d weights of %s are base + adapter, with rounding of at most %.1e.",
            len(inside),
            block.rstrip(".") or "the model",
            largest,
        )
