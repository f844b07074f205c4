"""Decides whether a server uses an adapter: vLLM loads some, and ignores them."""

import logging

from fsdp_qlora.utils.errors import RolloutError

log = logging.getLogger("fsdp_qlora")


def check_use(to_model: float, to_base: float, remedy: str) -> bool:
    """Whether a server is known to use the adapter; False if it cannot be told yet.

    It is decided once the server's log-probabilities are twice as near to one side as to the other.
    An adapter that has learned little is as near as the base.

    Args:
        to_model, to_base: mean distance of the server's log-probabilities of its answers' tokens
            from those of the adapted model, and from the base's.
        remedy: ends the message of the error.
    Raises:
        RolloutError: it does not use it, and its answers would stay the base's.
    """
    if 2 * to_base < to_model:
        raise RolloutError(
            f"The server ignores the adapter: its log-probabilities are {to_base:.2g} from the "
            f"base's and {to_model:.2g} from the adapted model's. vLLM ignores adapters of some "
            f"layers, as of some experts: {remedy}"
        )
    if 2 * to_model >= to_base:
        return False
    log.info(
        "The server uses the adapter: it is %.2g from the model, %.2g from the base.",
        to_model,
        to_base,
    )
    return True
