"""How hard the library's lines are to read: tokens per code line, and constructions that press
several things into one.

    python -m tests.density [FOLDER]

A code line holds at least one token that is no comment, no docstring and no layout. Other projects,
counted in the same way in November 2026, have 8.3 (nanochat), 7.4 (prime-rl), 6.6 (tinker-cookbook)
and 5.6 tokens per code line (torchtitan).
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

LAYOUT = {
    tokenize.NEWLINE,
    tokenize.NL,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.COMMENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
PER_1000_LINES = (
    "comments",
    "tuple assignments",
    "conditional expressions",
    "walruses",
    "spreads in dicts",
    "Any",
)


def count(text: str) -> Counter[str]:
    """The numbers of lines, code lines, tokens and constructions of one source."""
    tree = ast.parse(text)
    docstrings = set(_docstring_lines(tree))
    code_lines = set()
    counts = Counter({"lines": text.count("\n")})
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            counts["comments"] += token.line.strip().startswith("#")
        elif token.type not in LAYOUT and token.start[0] not in docstrings:
            counts["tokens"] += 1
            code_lines.add(token.start[0])
    counts["code lines"] = len(code_lines)
    counts.update(name for node in ast.walk(tree) for name in _constructions(node))
    return counts


def _docstring_lines(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _constructions(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Assign):
        if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield "tuple assignments"
    elif isinstance(node, ast.IfExp):
        yield "conditional expressions"
    elif isinstance(node, ast.NamedExpr):
        yield "walruses"
    elif isinstance(node, ast.Dict):
        yield from ["spreads in dicts"] * node.keys.count(None)
    elif isinstance(node, ast.Name) and node.id == "Any":
        yield "Any"
    elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
        names = [ast.unparse(each).partition("(")[0] for each in node.decorator_list]
        bases = [ast.unparse(base).partition("[")[0] for base in node.bases]
        if any(name.endswith("dataclass") for name in names) or "NamedTuple" in bases:
            yield "public dataclasses"
        if "Protocol" in bases:
            yield "public protocols"


def by_package(folder: Path) -> dict[str, Counter[str]]:
    """Package -> its counts; "." for the files beside the packages, "all" for all of them."""
    packages: dict[str, Counter[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        name = parts[0] if len(parts) > 1 else "."
        packages.setdefault(name, Counter()).update(count(path.read_text()))
    packages["all"] = sum(packages.values(), Counter())
    return packages


def tokens_per_line(counts: Mapping[str, int]) -> float:
    return counts["tokens"] / max(1, counts["code lines"])


# --- constructions that are not used ---


def pressed_together(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) of each construction that does several things at once to save lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            if _is_unrelated_tuple(node.targets[0], node.value):
                yield node.lineno, "a tuple assignment of unrelated values"
        elif isinstance(node, ast.Dict):
            spread = [value for key, value in zip(node.keys, node.values, strict=True) if not key]
            if any(isinstance(value, ast.Dict) for value in spread):
                yield node.lineno, "a dict display that is spread into another"
        elif isinstance(node, ast.Call):
            if any(_is_plain_spread(keyword) for keyword in node.keywords):
                yield node.lineno, "a dict display that is spread into a call"
        elif isinstance(node, ast.BinOp):
            if isinstance(node.op, ast.Mult) and _is_text(node.left) and _is_bool(node.right):
                yield node.lineno, "text or a list times a bool"
        elif isinstance(node, ast.IfExp):
            branches = (node.body, node.orelse)
            if any(isinstance(branch, ast.IfExp) for branch in branches):
                yield node.lineno, "a conditional expression in another"


def _is_unrelated_tuple(target: ast.expr, value: ast.expr) -> bool:
    """A swap, whose values are the targets in another order, is one thing."""
    if not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple):
        return False
    return {ast.unparse(each) for each in target.elts} != {ast.unparse(x) for x in value.elts}


def _is_plain_spread(keyword: ast.keyword) -> bool:
    if keyword.arg is not None or not isinstance(keyword.value, ast.Dict):
        return False
    keys = keyword.value.keys
    return all(isinstance(key, ast.Constant) and str(key.value).isidentifier() for key in keys)


def _is_text(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple)


def _is_bool(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) == "bool"
    is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return is_not or isinstance(node, ast.Compare | ast.BoolOp)


# --- the table ---


def table(packages: Mapping[str, Counter[str]]) -> Iterable[str]:
    """A line for each package, the hardest to read first."""
    heads = ["lines", "tokens", "per line", *PER_1000_LINES, "public dataclasses, protocols"]
    yield " ".join(f"{head:>12}" for head in ["package", *heads])
    for name in sorted(packages, key=lambda name: -tokens_per_line(packages[name])):
        counts = packages[name]
        lines = max(1, counts["lines"])
        cells = [f"{counts['lines']:,}", f"{counts['tokens']:,}", f"{tokens_per_line(counts):.2f}"]
        cells += [f"{1000 * counts[each] / lines:.1f}" for each in PER_1000_LINES]
        cells += [f"{counts['public dataclasses']}, {counts['public protocols']}"]
        widths = [12, *(max(12, len(head)) for head in heads)]
        row = [name, *cells]
        yield " ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))


if __name__ == "__main__":
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "fsdp_qlora")
    print("\n".join(table(by_package(root))))
