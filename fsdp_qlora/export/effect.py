"""How much of an adapter's update is left in merged weights, which are rounded to their type."""

import logging
import math

import torch

log = logging.getLogger("fsdp_qlora")

# The share of an update below which a merged model is more its base than what was trained.
_FEW = 0.5


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
