"""Compares two runs of same_bytes.sh by their files, and by metrics.jsonl without times."""

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "adapter_config.json",
    "config.json",
    "generation_config.json",
)
TIME_OR_MEMORY = re.compile("second|minute|hour|time|memory|gib|usd")


class Failed(Exception):
    """A run did not end as it should, or left nothing to compare."""


class Content(NamedTuple):
    """A file, or one tensor in it.

    It has what must be the same, and where to look how far it is from that.
    """

    digest: str
    path: Path
    tensor: str = ""


class Difference(NamedTuple):
    """relative: of numbers to the larger one, of tensors by norm; infinite where they cannot be
    compared.
    """

    relative: float
    what: str


class Verdict(NamedTuple):
    """differences: beyond the tolerance. largest: of those within it."""

    differences: list[str]
    new_keys: tuple[str, ...] = ()
    largest: Difference = Difference(0.0, "")

    def __str__(self) -> str:
        if self.differences:
            more = f"; and {len(self.differences) - 5} more" if len(self.differences) > 5 else ""
            return "DIFFERENT: " + "; ".join(self.differences[:5]) + more
        equal = (
            (f"equal to {self.largest.relative:.1e} ({self.largest.what})")
            if self.largest.relative
            else "equal"
        )
        return equal + (
            f" (new in metrics.jsonl: {', '.join(self.new_keys)})" if self.new_keys else ""
        )


def compare(old: Path, new: Path, tolerance: float) -> Verdict:
    """Two runs' folders.

    Args:
        tolerance: relative; 0 demands the same bytes.
    """
    found, new_keys = compare_metrics(metrics(old), metrics(new))
    before = saved(old)
    after = saved(new)
    for name in sorted(before.keys() | after.keys()):
        if name not in after or name not in before:
            found.append(
                Difference(math.inf, f"{name} is {'missing' if name in before else 'new'}")
            )
        elif before[name].digest != after[name].digest:
            relative = relative_difference(before[name], after[name]) if tolerance else math.inf
            found.append(
                Difference(
                    relative,
                    f"{name} differs{f' by {relative:.1e}' if relative < math.inf else ''}",
                )
            )
    differences = [each.what for each in found if not each.relative <= tolerance]
    within = [each for each in found if each.relative <= tolerance]
    return Verdict(differences, new_keys, max(within, default=Difference(0.0, "")))


def compare_metrics(
    old: list[dict[str, Any]], new: list[dict[str, Any]]
) -> tuple[list[Difference], tuple[str, ...]]:
    """The differences, and the keys that only the new records have."""
    differences = []
    if len(old) != len(new):
        counts = f"metrics.jsonl has {len(new)} records instead of {len(old)}"
        differences.append(Difference(math.inf, counts))
    new_keys = set()
    for record, other in zip(old, new, strict=False):
        new_keys |= other.keys() - record.keys()
        differences += [
            Difference(
                _of_numbers(value, other.get(name)),
                f"{name} at step {record['step']} is {other.get(name)} instead of {value}",
            )
            for name, value in record.items()
            if other.get(name) != value
        ]
    return differences, tuple(sorted(new_keys))


def metrics(output_dir: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl without times and memory."""
    records = map(json.loads, (output_dir / "metrics.jsonl").read_text().splitlines())
    return [
        {name: value for name, value in record.items() if not TIME_OR_MEMORY.search(name)}
        for record in records
    ]


def saved(output_dir: Path) -> dict[str, Content]:
    """Everything that must be equal but the log: results by the file, checkpoints by the tensor."""
    files = [path for pattern in RESULTS for path in output_dir.glob(pattern)]
    found = {
        path.name: Content((json_hash if path.suffix == ".json" else file_hash)(path), path)
        for path in files
    }
    for path in output_dir.glob("checkpoints/step_*/*.safetensors"):
        found |= {
            f"{path.parent.name}/{path.name}:{name}": each for name, each in tensors(path).items()
        }
    if not any(name.endswith(".safetensors") for name in found) or not any(
        name.startswith("step_") for name in found
    ):
        raise Failed(
            f"a run saved no result or no checkpoint, only {', '.join(sorted(found)) or 'nothing'}"
        )
    return found


def tensors(path: Path) -> dict[str, Content]:
    """Tensor -> type, shape and hash of a safetensors file, whatever their order in it."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    found = {}
    for name, about in json.loads(content[8:start]).items():
        if name != "__metadata__":
            first, end = (start + offset for offset in about["data_offsets"])
            digest = hashlib.sha256(content[first:end]).hexdigest()
            found[name] = Content(f"{about['dtype']} {about['shape']} {digest}", path, name)
    return found


def file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def json_hash(path: Path) -> str:
    """The hash of a JSON file's content.

    Lists of names are sorted first, since PEFT keeps target_modules as a set without an order.
    """

    def in_order(node: Any) -> Any:
        if isinstance(node, dict):
            return {name: in_order(value) for name, value in node.items()}
        if isinstance(node, list) and not all(isinstance(value, str) for value in node):
            return [in_order(value) for value in node]
        return sorted(node) if isinstance(node, list) else node

    return hashlib.sha256(json.dumps(in_order(json.loads(path.read_text()))).encode()).hexdigest()


def relative_difference(old: Content, new: Content) -> float:
    """The largest relative difference of a file's tensors, or of one tensor."""
    if old.path.suffix != ".safetensors":
        return math.inf
    before = tensors(old.path)
    after = tensors(new.path)
    if not old.tensor and before.keys() != after.keys():
        return math.inf
    names = [old.tensor] if old.tensor else list(before)
    return max(_of_tensors(old.path, new.path, name) for name in names)


def _of_tensors(old: Path, new: Path, name: str) -> float:
    from safetensors import safe_open

    with safe_open(old, "pt") as one, safe_open(new, "pt") as other:
        before = one.get_tensor(name)
        after = other.get_tensor(name)
    if before.shape != after.shape or before.dtype != after.dtype or not before.is_floating_point():
        return 0.0 if before.dtype == after.dtype and before.equal(after) else math.inf
    distance = (after.double() - before.double()).norm()
    relative = float(distance / before.double().norm()) if distance else 0.0
    return (
        relative / 2 if name.endswith("/exp_avg_sq") else relative
    )  # that of the gradients that it has the squares of


def _of_numbers(old: Any, new: Any) -> float:
    if not all(isinstance(value, float) and math.isfinite(value) for value in (old, new)):
        return math.inf
    return abs(new - old) / max(abs(old), abs(new))
