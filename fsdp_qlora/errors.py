"""The error a user can act on."""


class UserError(ValueError):
    """Bad input. `train.py` prints the message on every rank and exits with status 2."""


class TrainingError(RuntimeError):
    """The run cannot go on. `train.py` prints the message on every rank and exits with status 1."""
