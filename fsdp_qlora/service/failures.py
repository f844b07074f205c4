"""Whether a command that failed has failed on all ranks."""

from datetime import timedelta

import torch.distributed as dist

from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.supervision.exits import is_lost
from fsdp_qlora.utils.errors import Crashed, LostRank, TrainingError

_WAIT = timedelta(seconds=10)  # for the other ranks to fail, too


class Failures:
    """Finds out whether all ranks have failed at a command.

    If some have not, these wait for the others for ever.
    """

    def __init__(self, store: dist.Store, ranks: Ranks) -> None:
        self.store = store
        self.ranks = ranks
        self._count = 0

    def are_of_all_ranks(self, error: Exception) -> bool:
        """Whether all ranks call this within some seconds.

        Errors that no request has caused are not such a failure.
        """
        if isinstance(error, (TrainingError, LostRank, Crashed)) or is_lost(error):
            return False
        # Every rank has counted the same failures, as it calls this for each, so the keys agree.
        self._count += 1
        keys = [f"{self._count}/{rank}" for rank in range(self.ranks.world_size)]
        self.store.set(keys[self.ranks.rank], type(error).__name__)
        try:
            self.store.wait(keys, _WAIT)
        # torch's error of a store whose time is over.
        except RuntimeError:
            return False
        return True
