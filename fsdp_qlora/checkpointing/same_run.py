"""Whether the run in a folder is the one that a start asks for: its options, and its model and rows by content."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, get_args

from fsdp_qlora.checkpointing.run_folder import CHECKPOINTS, is_finished
from fsdp_qlora.config.options import option_types
from fsdp_qlora.data import schedule
from fsdp_qlora.errors import UserError

if TYPE_CHECKING:  # options are compared before torch is imported
    from fsdp_qlora.checkpointing.mirror import Store

# Properties of a run that are compared by content -> their names in messages.
FACTS = {
    "base": "the base model's weights (--model_name)",
    "model": "the model's config.json",
    "rows": "the rows (--dataset, --eval_dataset)",
    "precision": "the precision",
    "adapter": "the adapter to start from (--adapter)",
}


@dataclass(frozen=True)
class StartRequest:
    """What a start was asked to do.

    options: all options of the run, as stored in run.json. may_differ: names of options that may change on resume; the
    model and the rows are compared by content, the batch by its global size. resume: auto, off, or a checkpoint's or
    run's folder. overwrite: whether a finished or another run may be replaced. is_unattended: started by torchrun or a
    script: an explicit `resume` is not repeated, and the number of starts without progress is limited.
    mirror: store of copies, from which an empty folder is filled.
    """

    options: Mapping[str, Any]
    may_differ: Collection[str] = ()
    world_size: int = 1
    resume: str = "auto"
    overwrite: bool = False
    is_unattended: bool = False
    mirror: "Store | None" = None

    @property
    def origin(self) -> Path | None:
        """The folder to start from, if one was given."""
        return None if self.resume in ("auto", "off") else Path(self.resume).expanduser()


class Run(NamedTuple):
    """The run that is about to start, and its folder."""

    output_dir: Path
    identity: Mapping[str, Any]
    request: StartRequest

    def differences(self, stored: Mapping[str, Any]) -> list[str]:
        return find_differences(stored, self.identity["facts"], self.request)


def find_differences(stored: Mapping[str, Any], facts: Mapping[str, Any], request: StartRequest) -> list[str]:
    """A line for each way in which a stored run differs. facts: those of this start that are known."""
    then, options = stored.get("options", {}), request.options
    differences = [
        f"--{name} was {_shown(then[name])} and is {_shown(value)}{_removed(name, then[name])}"
        for name, value in options.items()
        if name not in request.may_differ and name in then and then[name] != value
    ]
    if request.world_size == stored.get("world_size"):
        rows, before = _rows_per_step(options, request.world_size), stored["global_batch_size"]
        if rows not in (before, _rows_per_step(then, request.world_size)):
            differences.append(
                f"--batch_size x --gradient_accumulation_steps x {request.world_size} ranks was {before} rows per step "
                f"and is {rows}"
            )
    for name, now in facts.items():
        called, was = FACTS[name], stored.get("facts", {}).get(name)
        if was != now:
            shown = f": {was} then, {now} now" if name == "precision" else ""
            differences.append(f"{called} {'are' if name == 'rows' else 'is'} not the same{shown}")
    return differences


def _rows_per_step(options: Mapping[str, Any], world_size: int) -> int:
    return schedule.global_batch_size(options["batch_size"], options["gradient_accumulation_steps"], world_size)


def _removed(name: str, value: object) -> str:
    is_known = name != "optimizer" or value in get_args(option_types()["optimizer"])
    return "" if is_known else ", and this version cannot resume it"


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def refuse(folder: Path | str, differences: list[str]) -> NoReturn:
    """Refuse to continue the run in a folder, a checkpoint or a mirror (its name), because of these differences."""
    advice = "Give the same options to resume it, another folder, or --overwrite_output_dir true to replace it."
    kind = "a finished" if isinstance(folder, Path) and is_finished(folder) else "an unfinished"
    if isinstance(folder, Path):
        run = folder.parents[1] if folder.parent.name == CHECKPOINTS else folder
        advice += f" To train its adapter further, as a new run, give another --output_dir and --adapter {run}."
    raise UserError("\n  ".join([f"{folder} belongs to {kind} run with other settings:", *differences]) + f"\n{advice}")
