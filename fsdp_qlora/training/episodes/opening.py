"""Starts the environments of a run, and tells all ranks what they offer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from fsdp_qlora.distributed.ranks import Ranks
from fsdp_qlora.distributed.store import all_gather_via_store
from fsdp_qlora.training.environments.pool import Environments
from fsdp_qlora.training.environments.words import parse_environments


@dataclass(frozen=True)
class OpenedEnvironments:
    """The environments of a run. Names are those of rows; "" is the only one's."""

    tools: Mapping[str, list[dict[str, Any]]]
    """JSON schemas of each environment's tools."""
    rewards: Mapping[str, str] = field(default_factory=dict)
    """The name of the reward of each environment that has one."""
    have_tools: bool = True
    """Whether one has tools, or may have: some name them in each episode."""
    described: Sequence[str] = ()
    """The environments with hashes of their files."""
    rows: Sequence[Mapping[str, Any]] = ()
    """The rows of an only environment that has its own."""
    processes: Environments | None = None
    """On rank 0."""


def open_environments(
    words: Sequence[str],
    *,
    call_seconds: float,
    episode_seconds: float,
    ranks: Ranks,
    store: dist.Store | None,
) -> OpenedEnvironments | None:
    """Start the environments on rank 0. Called on every rank; returns None for no words.

    Args:
        store: as of `agree_on_decisions`.
    Raises:
        UserError: a word is wrong.
        RankError: an environment cannot be started.
    """
    if not parse_environments(words):
        return None
    processes = None
    text = ""
    if ranks.is_rank_0:
        processes = Environments(words, call_seconds=call_seconds, episode_seconds=episode_seconds)
        facts = processes.start()
        tools = {name or "": known.tools for name, known in facts.items()}
        rewards = {
            name or "": known.class_name for name, known in facts.items() if known.has_reward
        }
        have_tools = any(known.tools or known.asks for known in facts.values())
        described = [known.described for known in facts.values()]
        asking = [name for name, known in facts.items() if known.asks]
        rows = processes.rows(None) if asking == [None] else None
        text = json.dumps([tools, rewards, have_tools, described, rows or []])
    if store is not None:
        [text, *_] = all_gather_via_store(text, "the tools of the environments", ranks, store)
    tools, rewards, have_tools, described, own_rows = json.loads(text)
    return OpenedEnvironments(tools, rewards, have_tools, described, own_rows, processes)
