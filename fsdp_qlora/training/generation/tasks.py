"""Measures tasks of lm-eval on a sharded model.

For --eval_tasks of a training run, and for `fsdp-qlora evaluate --tasks`.
"""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fsdp_qlora.distributed.process_group import all_gather_strings
from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.model.architecture.precision import Precision
from fsdp_qlora.sharding.groups import reshard_all
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.files import is_special
from fsdp_qlora.utils.text import first_line


class Tasks:
    """Tasks of lm-eval, by name or as YAML files, with their rows.

    They are loaded once, and measured as often as asked.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Load them. Raises UserError if one cannot be."""
        special = [name for name in names if is_special(Path(name))]
        if special:
            raise UserError(
                f"lm-eval cannot load the task {special[0]}: it is a pipe, a device or a socket."
            )
        # lm-eval is an optional dependency, and its import takes seconds.
        from lm_eval.tasks import TaskManager

        # Reading the library's own tasks takes 15 s, and is left out where all are files.
        needs_library = not all(Path(name).is_file() for name in names)
        self._manager = TaskManager(include_defaults=needs_library)
        try:
            loaded = self._manager.load(list(names))
        # What it raises is not documented.
        except Exception as error:
            raise UserError(
                f"lm-eval cannot load the tasks {', '.join(names)}: {first_line(error)}."
            ) from error
        # A group measures its own tasks: they would be measured twice.
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
            batch_size: requests that a rank takes at a time.
            beat: called for each forward pass.
            options: as for lm-eval.
        """
        from lm_eval.evaluator import simple_evaluate

        beating = model.register_forward_pre_hook(lambda *_: beat())
        options["task_manager"] = self._manager
        # A rank whose answers have all ended goes on until the other ranks' have, too.
        options["gen_kwargs"] = {"synced_gpus": True}
        # All ranks would write all answers, which may differ by rounding.
        options["log_samples"] = False
        try:
            lm = _sharded_lm(model, tokenizer, precision, ranks, batch_size)
            results = simple_evaluate(lm, tasks=self._loaded, **options)
        finally:
            beating.remove()
            reshard_all(model)
        # lm-eval returns None on all ranks but rank 0.
        if not results:
            return {}
        metrics_of_task = dict(results["results"]) | results.get("groups", {})
        return {task: _numbers(metrics) for task, metrics in metrics_of_task.items()}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The values among a task's metrics. Their names end with a filter, which is mostly none."""
    return {
        name.removesuffix(",none"): value
        for name, value in metrics.items()
        if isinstance(value, float)
    }


def _sharded_lm(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    precision: Precision,
    ranks: Ranks,
    batch_size: int,
) -> Any:
    """The model as lm-eval calls it: requests are dealt to the ranks."""
    from lm_eval.models.huggingface import HFLM

    class ShardedLM(HFLM):  # type: ignore[misc]  # the library has no types
        """Every rank gets all requests, and computes its share of them.

        All ranks call the model equally often, since each of its forward passes is collective.
        """

        def _loglikelihood_tokens(
            self, requests: list[Any], disable_tqdm: bool = False, **more: Any
        ) -> list[Any]:
            # The first request fills up, so that every rank has as many.
            missing = -len(requests) % ranks.world_size
            dealt = [*requests, *requests[:1] * missing][ranks.rank :: ranks.world_size]
            local = super()._loglikelihood_tokens(dealt, disable_tqdm=not ranks.is_rank_0, **more)
            gathered = all_gather_strings(json.dumps(local), torch.device("cpu"))
            answers = []
            for answers_of_ranks in zip(*map(json.loads, gathered), strict=True):
                answers += [tuple(answer) for answer in answers_of_ranks]
            return answers[: len(requests)]

    lm = ShardedLM(
        model,
        "causal",
        # lm-eval gives it a pad token, and the run saves its own.
        tokenizer=copy.deepcopy(tokenizer),
        batch_size=batch_size,
        # A cache of logits would make the number of batches depend on a rank's requests.
        logits_cache=False,
        softmax_dtype=torch.float32,
        mixed_precision_dtype=precision.compute_dtype if precision.autocast else None,
    )
    # lm-eval asks the model, whose offloaded weights are elsewhere.
    lm._device = ranks.device
    return lm
