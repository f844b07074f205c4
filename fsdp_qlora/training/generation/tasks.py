"""Measures tasks of lm-eval on a sharded model: --eval_tasks of a training run, and `fsdp-qlora
evaluate --tasks`.
"""

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fsdp_qlora.distributed.process_group import all_gather_strings
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.model.architecture.precision import Precision
from fsdp_qlora.sharding.parallelize import reshard_all
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import is_special
from fsdp_qlora.utils.text import first_line


class Tasks:
    """Tasks of lm-eval (names, or YAML files) with their rows: loaded once, and measured as often
    as asked.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Load them. Raises UserError if one cannot be."""
        special = [name for name in names if is_special(Path(name))]
        if special:
            raise UserError(
                f"lm-eval cannot load the task {special[0]}: it is a pipe, a device or a socket."
            )
        from lm_eval.tasks import TaskManager

        # takes 15 s
        self._manager = TaskManager(
            include_defaults=not all(Path(name).is_file() for name in names)
        )
        try:
            loaded = self._manager.load(list(names))
        except Exception as error:  # what it raises is not documented
            raise UserError(
                f"lm-eval cannot load the tasks {', '.join(names)}: {first_line(error)}."
            ) from error
        inner = {name for children in loaded["group_map"].values() for name in children}
        self._loaded = [
            task for name, task in (loaded["tasks"] | loaded["groups"]).items() if name not in inner
        ]

    def measure(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        precision: Precision,
        ranks: Ranks,
        *,
        batch_size: int,
        beat: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> dict[str, Any]:
        """The metrics of each task and group, on rank 0. Called on every rank.

        Args:
            batch_size: requests that a rank takes at a time. beat: called for each forward pass.
            options: as for lm-eval.
        """
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        class ShardedLM(HFLM):  # type: ignore[misc]  # the library has no types
            """Every rank gets all requests, and all call the model equally often, each for as many
            requests.
            """

            def _loglikelihood_tokens(
                self, requests: list[Any], disable_tqdm: bool = False, **more: Any
            ) -> list[Any]:
                dealt = [*requests, *requests[:1] * (-len(requests) % ranks.world_size)][
                    ranks.rank :: ranks.world_size
                ]
                own = super()._loglikelihood_tokens(dealt, disable_tqdm=not ranks.is_rank_0, **more)
                parts = map(json.loads, all_gather_strings(json.dumps(own), torch.device("cpu")))
                return [
                    tuple(answer) for answers in zip(*parts, strict=True) for answer in answers
                ][: len(requests)]

        beating = model.register_forward_pre_hook(lambda *_: beat())
        autocast = precision.compute_dtype if precision.autocast else None
        dtypes = {"softmax_dtype": torch.float32, "mixed_precision_dtype": autocast}
        own_tokenizer = copy.deepcopy(tokenizer)  # it gets a pad token, and the run saves its own
        # A cache of logits would make the number of batches depend on a rank's requests.
        lm = ShardedLM(
            model,
            "causal",
            tokenizer=own_tokenizer,
            batch_size=batch_size,
            logits_cache=False,
            **dtypes,
        )
        lm._device = ranks.device  # offloaded weights are elsewhere
        # all ranks write all answers, which may differ by rounding
        until_all_end = {"synced_gpus": True}
        options |= {
            "task_manager": self._manager,
            "gen_kwargs": until_all_end,
            "log_samples": False,
        }
        try:
            results = simple_evaluate(lm, tasks=self._loaded, **options)
        finally:
            beating.remove()
            reshard_all(model)
        return {
            task: {
                name.removesuffix(",none"): value
                for name, value in metrics.items()
                if isinstance(value, float)
            }
            for task, metrics in (
                (results["results"] | results.get("groups", {})) if results else {}
            ).items()
        }
