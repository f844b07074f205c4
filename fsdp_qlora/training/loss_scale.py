"""The factor on the loss in fp16."""

# The first scale, and the steps without an overflow after which it is
# doubled, are the defaults of torch.amp.GradScaler.
_FIRST_SCALE = 2.0**16
_SCALE_GROWTH_INTERVAL = 2000
# At 1 nothing is scaled, so an overflow is the model's own.
_SMALLEST_SCALE = 1.0


class LossScale:
    """The factor on the loss in fp16, which keeps small gradients from becoming zero.

    Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
    It is halved when gradients overflow, and doubled after many steps without an overflow. Every
    rank computes it from the same gradient norms, so all agree. Without scaling it stays 1.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = _FIRST_SCALE if enabled else 1.0
        self.steps_since_change = 0

    @property
    def can_fall(self) -> bool:
        return self.enabled and self.scale > _SMALLEST_SCALE

    def update(self, *, overflowed: bool) -> None:
        """Update after an optimizer step."""
        if not self.enabled:
            return
        self.steps_since_change += 1
        if overflowed:
            self.scale = max(self.scale / 2, _SMALLEST_SCALE)
            self.steps_since_change = 0
        elif self.steps_since_change == _SCALE_GROWTH_INTERVAL:
            self.scale = self.scale * 2
            self.steps_since_change = 0

    def state(self) -> dict[str, float]:
        """The values to save in a checkpoint."""
        return {"scale": self.scale, "steps_since_change": self.steps_since_change}

    def load_state(self, state: dict[str, float]) -> None:
        self.scale = float(state["scale"])
        self.steps_since_change = int(state["steps_since_change"])
