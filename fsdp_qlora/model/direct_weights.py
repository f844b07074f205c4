"""Finds linear layers whose weights other modules read, such as those that a Mamba layer hands to its kernel."""

import ast
import contextlib
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator

from torch import nn

from fsdp_qlora.model.models import block_linears, find_blocks

_READ = re.compile(r"self\.([\w.]+)\.(?:weight|bias)")
_SWITCH = re.compile(r"(?:^| and )self\.(?!training)(\w+)(?= and |$)")  # an attribute that a test needs to be true


def read_directly(model: nn.Module) -> list[str]:
    """Paths of the decoder blocks' linear layers whose weight or bias another module reads.

    Found in the modules' source: what a pass reads depends on a machine's kernels, and adapters must fit everywhere.
    """
    inside = {*find_blocks(model).modules()}
    found = {
        f"{path}.{child}"
        for path, module in model.named_modules()
        if module in inside
        for child, switches in _reads(type(module))  # type: ignore[arg-type]
        if all(getattr(module, switch, True) for switch in switches)
    }
    return [path for path in block_linears(model) if path in found]


@functools.cache
def _reads(kind: type[nn.Module]) -> set[tuple[str, frozenset[str]]]:
    """(path of a child, attributes of the module that are true where it reads the child's weight or bias)."""
    found: set[tuple[str, frozenset[str]]] = set()
    own = [vars(each) for each in kind.__mro__ if not each.__module__.startswith("torch.")]
    for name, method in (item for methods in own for item in methods.items()):
        if inspect.isfunction(method) and not re.search("init|reset", name):
            with contextlib.suppress(OSError, SyntaxError):  # made without a file
                tree = ast.parse("if True:\n" + textwrap.indent(inspect.getsource(method), " "))
                found.update(_reads_below(tree, frozenset()))
    return found


def _reads_below(node: ast.AST, switches: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    if isinstance(node, ast.Attribute) and (read := _READ.fullmatch(ast.unparse(node))):
        yield read[1], switches
    for each in ast.iter_child_nodes(node):
        needed = _SWITCH.findall(ast.unparse(node.test)) if isinstance(node, ast.If) and each in node.body else ()
        yield from _reads_below(each, switches.union(needed))
