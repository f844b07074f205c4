"""Takes the newest checkpoint of a run from its mirror, if it got further on another machine."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdp_qlora.checkpoint import checkpoint
from fsdp_qlora.checkpoint.mirror import Store, fetch
from fsdp_qlora.checkpoint.run_folder import (
    RUN_KEYS,
    StartRequest,
    find_differences,
    is_finished,
    is_run,
    read_run,
    refuse,
)
from fsdp_qlora.utils.errors import UserError
from fsdp_qlora.utils.run_files import CHECKPOINTS, RUN

log = logging.getLogger("fsdp_qlora")


def copied_run(mirror: Store | None, output_dir: Path) -> dict[str, Any]:
    """The run.json of the run on the mirror; empty if there is none."""
    if mirror is None:
        return {}
    try:
        copied = mirror.run()
    except OSError as error:
        # Without a run here, one that is on the mirror alone would start over, and replace it.
        if not is_run(output_dir):
            raise UserError(
                f"--mirror {mirror.name} cannot be reached ({error}), and it may hold checkpoints "
                "of this run. Try again, or leave the option out."
            ) from error
        log.warning(
            "The mirror %s cannot be reached: %s. The run continues from its own folder.",
            mirror.name,
            error,
        )
        return {}
    if copied and not set(RUN_KEYS) <= copied.keys():
        raise UserError(
            f"--mirror {mirror.name}: its {RUN} cannot be used. Give another mirror, or none."
        )
    return copied


def take_from_mirror(
    mirror: Store,
    copied: Mapping[str, Any],
    output_dir: Path,
    request: StartRequest,
    facts: Mapping[str, Any],
) -> None:
    """Copy the newest checkpoint from the mirror, if the run got further on another machine.

    Args:
        copied: from `copied_run`.
        facts: of this start's identity.
    Raises:
        UserError: the mirror holds another run, or no checkpoint that passes verification.
    """
    is_here = is_run(output_dir)
    stored = read_run(output_dir) or copied
    differences = find_differences(stored, facts, request)
    if differences and not is_here and not request.overwrite:
        refuse(mirror.name, differences)
    if differences or stored["run_id"] != copied["run_id"] or is_finished(output_dir):
        return
    newest = max(checkpoint.published(output_dir / CHECKPOINTS), default=-1)
    ahead = max(mirror.steps(), default=-1)
    # The folder wins a tie: its checkpoint needs no download.
    if is_here and ahead <= newest:
        return
    log.info(
        "The mirror %s has %s of this run, and %s has %s: the run resumes from the mirror's.",
        mirror.name,
        f"step {ahead}" if ahead >= 0 else "no checkpoint",
        output_dir,
        f"step {newest}" if newest >= 0 else "none",
    )
    if not fetch(mirror, output_dir, later_than=newest) and newest < 0:
        raise UserError(
            f"No checkpoint on the mirror {mirror.name} passes verification. Restore a good copy "
            "of one, or start from zero with another --mirror, or with none."
        )
