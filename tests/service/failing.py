"""`serve` with losses and adapters that fail: python -m tests.service.failing --model_name ...

Its dro raises an error on all ranks where beta is 13, and on the second rank alone where it is 14.
"""

import dataclasses
import os
import sys
from typing import Any

from fsdp_qlora.__main__ import main

ON_ALL = 13.0
ON_ONE = 14.0
UNLUCKY = 13  # a seed with which no adapter can be made


def failing(loss: Any) -> Any:
    def summed(p: Any, given: Any, config: Any, documents: Any) -> Any:
        if config["beta"] == ON_ALL or (config["beta"] == ON_ONE and os.environ["RANK"] == "1"):
            raise ArithmeticError("of a kind that nobody thought of")
        return loss.sum(p, given, config, documents)

    return dataclasses.replace(loss, sum=summed)


def made(make: Any) -> Any:
    def checked(self: Any, settings: Any) -> Any:
        if settings["seed"] == UNLUCKY:
            raise ArithmeticError("of a kind that nobody thought of")
        return make(self, settings)

    return checked


if __name__ == "__main__":
    from fsdp_qlora.service import adapter_store, losses

    adapter_store.AdapterStore.make = made(adapter_store.AdapterStore.make)  # type: ignore[method-assign]
    losses.LOSSES["dro"] = failing(losses.LOSSES["dro"])
    sys.exit(main(["serve", *sys.argv[1:]]))
