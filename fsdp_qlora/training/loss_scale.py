"""Loss scaling for fp16 (Micikevicius et al. 2018): small gradients are kept from becoming zero."""

_FIRST = 2.0**16  # torch.amp.GradScaler's defaults, these two
_GROWTH_INTERVAL = 2000  # steps without an overflow after which the scale is doubled
_SMALLEST = 1.0  # a gradient that overflows without any scale is the model's


class LossScale:
    """The factor on the loss, halved when gradients overflow and doubled when they have not for long.

    Every rank computes it from the same gradient norms, so that all agree. Without scaling it stays 1.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = _FIRST if enabled else 1.0
        self.steps_since_change = 0

    @property
    def can_fall(self) -> bool:
        return self.enabled and self.scale > _SMALLEST

    def update(self, *, overflowed: bool) -> None:
        """Take note of an optimizer step."""
        if not self.enabled:
            return
        self.steps_since_change += 1
        if overflowed:
            self.scale, self.steps_since_change = max(self.scale / 2, _SMALLEST), 0
        elif self.steps_since_change == _GROWTH_INTERVAL:
            self.scale, self.steps_since_change = self.scale * 2, 0

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "steps_since_change": self.steps_since_change}

    def load_state(self, state: dict[str, float]) -> None:
        self.scale, self.steps_since_change = float(state["scale"]), int(state["steps_since_change"])
