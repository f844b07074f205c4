"""The shape of the package: imports go one way, files and functions are short, and ideas stay in
few places.
"""

import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fsdp_qlora.config.objectives import OBJECTIVES
from fsdp_qlora.config.options import TrainConfig
from fsdp_qlora.training.objective import KINDS
from tests.density import by_package, count, pressed_together, tokens_per_line
from tests.helpers.run import ROOT

pytestmark = pytest.mark.quick

SOURCES = {
    path.relative_to(ROOT): path.read_text() for path in sorted((ROOT / "fsdp_qlora").rglob("*.py"))
}
MODULES = {".".join(path.with_suffix("").parts): ast.parse(text) for path, text in SOURCES.items()}
FUNCTIONS = [
    (f"{module}.{node.name}", node)
    for module, tree in MODULES.items()
    for node in ast.walk(tree)
    if isinstance(node, ast.FunctionDef)
]
MOST_LINES_OF_A_FILE = 500
MOST_LINES_OF_A_FUNCTION = 60
MOST_PARAMETERS = 7
FEWEST_LINES_OF_A_PACKAGE = 500
MORE_PARAMETERS: dict[str, str] = {}  # function -> why it takes more

MOST_FIELDS = 12
# Options: each is a field because it is an option.
OPTIONS = {"TrainConfig", "BaseOptions", "LearningOptions", "RunOptions"}

# What a contributor has to hold in the head. Lower a number when a sum falls.
MOST = {
    "packages of the library": 14,
    "files at the package's root": 3,
    # The last one chooses between kernels that are proved at the start and those of libraries.
    # Four are of environments in which a model acts, and limit what these may take. One has answers
    # sampled ahead, and two score answers to held-out prompts. One leaves the rows of a curriculum
    # in their order, and one trains on each row once. One trains what merge rounds to.
    "options": 107,
    # The last ones try blocks as graphs, which is for blocks that recompute, and plan and choose
    # those whose activations the host keeps instead; the choice for a machine left the search.
    # Towers with adapters are planned with what they keep, and counted with and without it.
    "files that name recompute": 31,
    "mentions of world_size outside the layout": 83,
    "places that ask for the kind of rows": 27,
}
# Tokens per code line of a package, and of the whole library. In steps of a half: no file is
# written for its last token.
MOST_TOKENS_OF_A_LINE = {
    "model": 9.5,
    "sharding": 9.5,
    "data": 9.5,
    "service": 9.5,
    "training": 9.5,
    "export": 9.0,
    "planning": 9.0,
    "observability": 9.0,
    "config": 8.5,
    "run": 8.5,
    "distributed": 8.5,
    "checkpoint": 8.5,
    "commands": 8.5,
    "utils": 8.0,
    ".": 8.0,
    "all": 9.0,
}
MOST_WALRUSES = 3  # for each 1,000 lines
MOST_CHARACTERS_OF_A_TESTS_NAME = 70
LAUNCHER = (
    # comes before the run, whose processes it starts as the options say
    "fsdp_qlora.distributed.supervision.launch"
)


def imports(tree: ast.AST) -> Iterator[str]:
    """The package's modules that a source imports, also inside of functions and for types alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield from {node.module, f"{node.module}.{alias.name}"} & MODULES.keys()
        elif isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & MODULES.keys()


def is_kernel(function: ast.FunctionDef) -> bool:
    """Whether Triton compiles it: a launch passes tensors, their strides and sizes one by one."""
    decorators = [getattr(each, "func", each) for each in function.decorator_list]
    return any(isinstance(each, ast.Name) and each.id == "jit" for each in decorators)


def folder_of(module: str) -> str:
    """The folder of a module within a package, such as model.adapters; of a file beside such
    folders itself.
    """
    return ".".join(module.split(".")[1:3])


def number_of_parameters(arguments: ast.arguments) -> int:
    named = arguments.posonlyargs + arguments.args + arguments.kwonlyargs
    return sum(argument.arg not in ("self", "cls") for argument in named)


def in_cycles(arrows: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """What is left when arrows from where none arrives, and to where none leaves, are taken away
    again and again.
    """
    left = {(start, end) for start, end in arrows if start != end}
    before = None
    while left != before:
        before = left
        starts = {start for start, _ in left}
        ends = {end for _, end in left}
        left = {(start, end) for start, end in left if start in ends and end in starts}
    return left


def test_neither_files_nor_folders_import_each_other_in_a_circle() -> None:
    assert in_cycles({("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")}) == {("b", "c"), ("c", "b")}
    arrows = {(module, imported) for module, tree in MODULES.items() for imported in imports(tree)}
    assert len(arrows) > 100 and not in_cycles(arrows)
    # A file beside packages counts as one.
    packages = {(start.split(".")[1], end.split(".")[1]) for start, end in arrows}
    assert not in_cycles(packages)
    assert not in_cycles({(folder_of(start), folder_of(end)) for start, end in arrows})
    # The options and their rules are read without a model, an adapter or the network.
    assert {end for start, end in packages if start == "config"} == {"config", "utils"}


def test_every_imported_library_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = [
        *project["dependencies"],
        *(need for extra in project["optional-dependencies"].values() for need in extra),
    ]
    declared = {re.split(r"[<>=\[-]", need)[0] for need in needs}
    nodes = [node for tree in MODULES.values() for node in ast.walk(tree)]
    imported = {
        alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
    }
    imported |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    libraries = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    assert {
        {"PIL": "pillow", "google": "protobuf", "yaml": "pyyaml"}.get(name, name)
        for name in libraries
    } <= declared


def test_packages_import_only_what_the_drawn_map_has_below_or_right() -> None:
    drawn = (ROOT / "docs/how_it_works.md").read_text().split("```\n")[1].split("\n\n")[0]
    packages = [
        name for line in drawn.splitlines() for name in line[: drawn.index("fsdp-qlora:")].split()
    ]
    assert set(packages) == {path.parts[1] for path in SOURCES if len(path.parts) > 2}
    arrows = {
        (module.split(".")[1], end.split(".")[1])
        for module, tree in MODULES.items()
        for end in imports(tree)
    }
    inside = {(start, end) for start, end in arrows if {start, end} <= {*packages}}
    assert not {
        (start, end) for start, end in inside if packages.index(start) > packages.index(end)
    }


# A part that the core does without, and the modules that may import it.
BOUNDARIES = {
    "fsdp_qlora.planning.offers": {"fsdp_qlora.commands.plan"},
    "fsdp_qlora.service": {"fsdp_qlora.commands.serve"},
    # A run writes its page at its end.
    "fsdp_qlora.observability.page": {"fsdp_qlora.commands.tools", "fsdp_qlora.run.supervision"},
}


def test_parts_behind_a_boundary_are_imported_at_one_place() -> None:
    for part, doors in BOUNDARIES.items():
        outside = {module: tree for module, tree in MODULES.items() if not module.startswith(part)}
        assert doors == {
            module
            for module, tree in outside.items()
            if any(end.startswith(part) for end in imports(tree))
        }


def test_packages_are_large_and_no_file_name_is_in_one_twice() -> None:
    files = [path for path in SOURCES if len(path.parts) > 2 and path.name != "__init__.py"]
    names = Counter((path.parts[1], path.name) for path in files)
    assert not [name for name, count in names.items() if count > 1]
    lines: Counter[str] = Counter()
    for path in files:
        lines[path.parts[1]] += SOURCES[path].count("\n")
    assert min(lines.values()) >= FEWEST_LINES_OF_A_PACKAGE


def test_only_planning_and_what_is_above_it_see_the_options_as_a_whole() -> None:
    imported = {
        (module, each.name)
        for module, tree in MODULES.items()
        for each in ast.walk(tree)
        if isinstance(each, ast.alias)
    }
    seeing = {
        module.split(".")[1]
        for module, name in imported
        if name == "TrainConfig" and module != LAUNCHER
    }
    assert seeing == {
        "__init__",
        "api",
        "commands",
        "config",
        "export",
        "planning",
        "run",
        "service",
    }


def test_the_step_names_no_objective_and_no_model() -> None:
    """An objective, a loss or a model is added without an `if` in these files."""
    model_types = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    names = {*OBJECTIVES, *KINDS} | model_types
    assert {"dpo", "pairs", "llama"} < names
    for file in ("trainer", "loop", "head_loss", "attach_loss", "whole_logits", "forward"):
        tree = MODULES[f"fsdp_qlora.training.{file}"]
        texts = {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert not texts & names, file


def test_the_chunk_loop_asks_no_loss_what_it_is() -> None:
    losses = {"CrossEntropy", "Divergence", "TopTokens"}
    for file in ("head_loss", "attach_loss", "whole_logits", "token_loss"):
        tree = MODULES[f"fsdp_qlora.training.{file}"]
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert not names & losses, file
        assert "isinstance" not in names or file == "attach_loss"  # of the head, an FSDPModule


def test_files_and_functions_are_short_and_functions_take_few_parameters() -> None:
    assert not [path for path, text in SOURCES.items() if text.count("\n") > MOST_LINES_OF_A_FILE]
    lengths = {(name, (node.end_lineno or 0) - node.lineno + 1) for name, node in FUNCTIONS}
    assert not {(name, lines) for name, lines in lengths if lines > MOST_LINES_OF_A_FUNCTION}
    functions = [(name, node) for name, node in FUNCTIONS if not is_kernel(node)]
    numbers = {(name, number_of_parameters(node.args)) for name, node in functions}
    assert {name for name, number in numbers if number > MOST_PARAMETERS} == MORE_PARAMETERS.keys()


def test_lines_are_easy_to_read() -> None:
    """`python -m tests.density` prints the table."""
    counts = count('# why\na = f(1)\n\n\ndef g() -> str:\n    """Text."""\n    return \'b\'\n')
    assert (counts["tokens"], counts["code lines"], counts["comments"]) == (15, 3, 1)
    packages = by_package(ROOT / "fsdp_qlora")
    now = {name: round(tokens_per_line(counts), 2) for name, counts in packages.items()}
    assert now.keys() == MOST_TOKENS_OF_A_LINE.keys()
    denser = {name: tokens for name, tokens in now.items() if tokens > MOST_TOKENS_OF_A_LINE[name]}
    assert not denser, "Give each thing its line, and parts of an expression a name."
    every = packages["all"]
    assert 1000 * every["walruses"] / every["lines"] <= MOST_WALRUSES


PRESSED = {
    "a, b = x, y": "a tuple assignment of unrelated values",
    "c = {**{'a': 1}, 'b': 2}": "a dict display that is spread into another",
    "f(**{'a': 1, 'b': 2})": "a dict display that is spread into a call",
    "f'rank{\"s\" * (n > 1)}'": "text or a list times a bool",
    "a if b else c if d else e": "a conditional expression in another",
}


def test_no_line_presses_several_things_together() -> None:
    for text, what in PRESSED.items():
        assert [found for _, found in pressed_together(ast.parse(text))] == [what]
    for text in ("a, b = b, a", "a, b = f()", "{**a, 'b': 1}", "f(**{'x-y': 1})", "'-' * (n + 1)"):
        assert not [*pressed_together(ast.parse(text))]
    pressed = [
        f"{module}:{line}: {what}"
        for module, tree in MODULES.items()
        for line, what in pressed_together(tree)
    ]
    assert not pressed, "\n".join(pressed)


def test_only_tables_are_formatted_by_hand() -> None:
    """A table ends with a bracket at the beginning of a line."""
    by_hand = [
        (path, line)
        for path, text in SOURCES.items()
        for line in text.splitlines()
        if "fmt: skip" in line and not re.match(r"[\])}]", line)
    ]
    assert not by_hand and not [path for path, text in SOURCES.items() if "fmt: off" in text]


def test_classes_have_few_fields() -> None:
    counts = {
        node.name: sum(isinstance(item, ast.AnnAssign) for item in node.body)
        for tree in MODULES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name not in OPTIONS
    }
    assert not {name for name, count in counts.items() if count > MOST_FIELDS}


def sums() -> dict[str, int]:
    """The sizes in MOST as they are now; empty files do not count."""
    files = [path for path, text in SOURCES.items() if text.strip()]
    return {
        "packages of the library": len({path.parts[1] for path in files if len(path.parts) > 2}),
        "files at the package's root": sum(path.parent == Path("fsdp_qlora") for path in files),
        "options": len(fields(TrainConfig)),
        "files that name recompute": sum(
            re.search(r"\brecompute", text) is not None for text in SOURCES.values()
        ),
        "mentions of world_size outside the layout": sum(
            text.count("world_size") for path, text in SOURCES.items() if path.name != "layout.py"
        ),
        "places that ask for the kind of rows": sum(
            len(
                re.findall(
                    r"\brow_kind\b *[=!]=|\.row_kind\b(?! *[=!]=)|\.kind_of_rows\(",
                    text,
                )
            )
            for text in SOURCES.values()
        ),
    }


def advice(grown: Mapping[str, int]) -> str:
    """What to do about sums that are larger than they may be."""
    lines = [f"{name}: {count:,}, at most {MOST[name]:,}" for name, count in grown.items()]
    return "\n".join(
        [
            "There is more to hold in the head.",
            *lines,
            "Keep the idea in the places that have it.",
            "If it must be in one more, raise its number in MOST and give the reason in the "
            "commit.",
        ]
    )


# Constructions that a native reader stumbles over.
NOT_PLAIN_ENGLISH = re.compile(
    # a text that begins with another word than its subject
    r"\A(?:As (?:in|of|an?|the|`)|Of|Those|What(?! helps)|In this|Let|Its)\b"
    # of X it is Y
    r"|(?:(?:\A|\. )Of|; of) (?:[\w'`-]+,? ){1,6}(?:it|they|all|this|the|is|are|counts?)\b"
    r"|\bthat of\b|\bso many\b|\bas many times\b|(?<![.`])\blikeliest\b"
    # maximum, minimum or top; "with the most" and adverbs are fine
    r"|(?<!with )(?<!need )(?<!needs )\b[Tt]he (?:most|least)\b"
    r"(?! \w+ly\b| (?:likely|probable|urgent))"
)


def texts_of(tree: ast.AST) -> Iterator[str]:
    """The docstrings, helps and messages of a source, each in one line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
            yield " ".join(" {} ".join(map(str, parts)).split())
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield " ".join(node.value.split())


def test_docstrings_help_and_messages_are_plain_english() -> None:
    for text in ("As in `Rows`.", "Rows; of a pair it is one.", "Its length is that of a row."):
        assert NOT_PLAIN_ENGLISH.search(text)
    for text in ("As many as fit.", "At most one of the rows.", "Ask the most likely failed rank."):
        assert not NOT_PLAIN_ENGLISH.search(text)
    trees = dict(MODULES)
    for folder in ("benchmarks", "scripts"):
        trees |= {str(path): ast.parse(path.read_text()) for path in (ROOT / folder).glob("*.py")}
    texts = [(module, text) for module, tree in trees.items() for text in texts_of(tree)]
    assert len(texts) > 5000 and not [
        (module, text) for module, text in texts if NOT_PLAIN_ENGLISH.search(text)
    ]


def test_names_of_tests_are_short() -> None:
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "stand_in").rglob("*.py")]
    tests = [ast.parse(path.read_text()) for path in files]
    names = [
        node.name for tree in tests for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
    ]
    assert len(names) > 500 and not [
        name for name in names if len(name) > MOST_CHARACTERS_OF_A_TESTS_NAME
    ]


def test_the_sums_do_not_grow() -> None:
    now = sums()
    assert now.keys() == MOST.keys() and all(now.values())
    grown = {name: count for name, count in now.items() if count > MOST[name]}
    assert not grown, advice(grown)
