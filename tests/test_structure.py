"""The shape of the package: imports go one way, files and functions are short."""

import ast
from collections.abc import Iterator

import pytest

from tests.tiny import ROOT

pytestmark = pytest.mark.quick

SOURCES = {path.relative_to(ROOT): path.read_text() for path in sorted((ROOT / "fsdp_qlora").rglob("*.py"))}
MODULES = {".".join(path.with_suffix("").parts): ast.parse(text) for path, text in SOURCES.items()}
FUNCTIONS = [
    (f"{module}.{node.name}", node)
    for module, tree in MODULES.items()
    for node in ast.walk(tree)
    if isinstance(node, ast.FunctionDef)
]
MOST_LINES_OF_A_FILE = 450
MOST_LINES_OF_A_FUNCTION = 60
MOST_PARAMETERS = 7
MORE_PARAMETERS: dict[str, str] = {}  # function -> why it takes more


def imports(tree: ast.AST) -> Iterator[str]:
    """The package's modules that a source imports, also inside of functions and for types alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield from {node.module, f"{node.module}.{alias.name}"} & MODULES.keys()
        elif isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & MODULES.keys()


def number_of_parameters(arguments: ast.arguments) -> int:
    named = arguments.posonlyargs + arguments.args + arguments.kwonlyargs
    return sum(argument.arg not in ("self", "cls") for argument in named)


def in_cycles(arrows: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """What is left when arrows from where none arrives, and to where none leaves, are taken away again and again."""
    left, before = {(start, end) for start, end in arrows if start != end}, None
    while left != before:
        before, starts, ends = left, {start for start, _ in left}, {end for _, end in left}
        left = {(start, end) for start, end in left if start in ends and end in starts}
    return left


def test_neither_files_nor_folders_import_each_other_in_a_circle() -> None:
    assert in_cycles({("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")}) == {("b", "c"), ("c", "b")}
    arrows = {(module, imported) for module, tree in MODULES.items() for imported in imports(tree)}
    assert len(arrows) > 100 and not in_cycles(arrows)
    # A file at the package's root counts as a folder.
    assert not in_cycles({(start.split(".")[1], end.split(".")[1]) for start, end in arrows})


def test_files_and_functions_are_short_and_functions_take_few_parameters() -> None:
    assert not [path for path, text in SOURCES.items() if text.count("\n") > MOST_LINES_OF_A_FILE]
    lengths = {(name, (node.end_lineno or 0) - node.lineno + 1) for name, node in FUNCTIONS}
    assert not {(name, lines) for name, lines in lengths if lines > MOST_LINES_OF_A_FUNCTION}
    numbers = {(name, number_of_parameters(node.args)) for name, node in FUNCTIONS}
    assert {name for name, number in numbers if number > MOST_PARAMETERS} == MORE_PARAMETERS.keys()
