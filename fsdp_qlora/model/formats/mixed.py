"""A model whose groups of linear layers are in several formats, such as NVFP4 and FP8."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from fsdp_qlora.model.formats.patterns import is_plain, matches_of_each
from fsdp_qlora.model.formats.published import PublishedFormat
from fsdp_qlora.model.formats.stored_tensors import ADVICE, Part
from fsdp_qlora.utils.errors import UserError

_ANY_LINEAR = "Linear"


@dataclass(frozen=True, kw_only=True)
class MixedFormat(PublishedFormat):
    """Formats of groups of layers: a layer is in its group's."""

    decoded_type: ClassVar[str] = "bf16 (integers: the type of their scales)"

    groups: Sequence[PublishedFormat]

    @classmethod
    def of(cls, groups: Sequence[PublishedFormat], skipped: Sequence[str]) -> Self:
        """The format of a model with these groups."""
        endings: dict[str, str | None] = {}
        for group in groups:
            endings |= group.endings
        return cls(
            name=_names(groups),
            # An ending is longer than one that it ends with.
            endings=dict(sorted(endings.items(), key=lambda item: -len(item[0]))),
            groups=groups,
            targets=[target for group in groups for target in group.targets],
            skipped=skipped,
        )

    @property
    def formats(self) -> Sequence[PublishedFormat]:
        return self.groups

    def formats_of(self, names: Iterable[str]) -> Mapping[str, PublishedFormat]:
        # As compressed-tensors chooses a group: names come before patterns, and patterns before
        # classes.
        paths = {name: name.removesuffix(".weight") for name in names}
        by_target = {target: group for group in self.groups for target in group.targets}
        patterns = sorted(target for target in by_target if not is_plain(target))
        matched = matches_of_each([*paths.values()], patterns)
        around = _around_targets(by_target)
        found: dict[str, PublishedFormat] = {}
        for name, path in paths.items():
            targets = [
                *(parent for parent in _with_parents(path) if parent in by_target),
                *(pattern for pattern in patterns if path in matched[pattern]),
                *(target for target in (_ANY_LINEAR,) if target in by_target),
            ]
            group = by_target[targets[0]] if targets else None
            # Experts may be named one by one, where the model has one parameter of all.
            if group is None and path == name:
                group = around.get(path.rpartition(".")[0])
            if group is None:
                raise UserError(
                    f"{path} is quantized, and no group of quantization_config has it among its "
                    f"targets. {ADVICE}"
                )
            found[name] = group
        return found

    def in_files(self, names: Iterable[str]) -> Self:
        scaled = self.weights_among(names)
        used = {id(group) for group in self.formats_of(scaled).values()}
        groups = [group for group in self.groups if id(group) in used] or self.groups
        return replace(self, scaled=scaled, groups=groups, name=_names(groups))

    def chosen(self, linears: Sequence[str], experts: Sequence[str]) -> tuple[list[str], list[str]]:
        around = _around_targets(dict.fromkeys(self.targets, self))
        named = [path for path in experts if path.rpartition(".")[0] in around]
        widened = replace(self, targets=[*self.targets, *named])
        return PublishedFormat.chosen(widened, linears, experts)

    def is_kept(self, quantizer: str | None, quant_type: str) -> bool:
        are_kept = all(group.is_kept(quantizer, quant_type) for group in self.groups)
        return are_kept and self.scaled != set()

    def check_without_scale(self, name: str, part: Part) -> None:
        for group in self.groups:
            group.check_without_scale(name, part)


def _names(groups: Sequence[PublishedFormat]) -> str:
    return " and ".join(dict.fromkeys(group.name for group in groups))


def _with_parents(path: str) -> Iterator[str]:
    """A path and those of the modules that it is in, the innermost first."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _around_targets(by_target: Mapping[str, PublishedFormat]) -> Mapping[str, PublishedFormat]:
    """The path of a module -> the format of the first target that is in it."""
    around: dict[str, PublishedFormat] = {}
    for target, group in by_target.items():
        if is_plain(target):
            for parent in _with_parents(target.rpartition(".")[0]):
                around.setdefault(parent, group)
    return around
