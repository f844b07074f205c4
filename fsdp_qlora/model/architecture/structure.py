"""The linear layers of a model, found by structure, and its parameters' names in weight files."""

import ast
import contextlib
import copy
import functools
import inspect
import re
import textwrap
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    PreTrainedModel,
)

from fsdp_qlora.model.architecture.decoder import find_blocks

_READ = re.compile(r"self\.([\w.]+)\.(?:weight|bias)")  # a weight that a method reads
# an attribute that a condition requires
_SWITCH = re.compile(r"(?:^| and )self\.(?!training)(\w+)(?= and |$)")
# in the paths of parameters, but not in weight files
_WRAPPERS = ("_checkpoint_wrapped_module", "base_layer")


def canonical_name(name: str) -> str:
    """A parameter's or module's path in the weight files, without wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@torch.no_grad()
def is_linear(module: nn.Module) -> bool:
    """Whether a module multiplies by its weight as nn.Linear does.

    Then a quantized or adapted layer may replace it. A forward method of its own, such as a product
    by groups (deepseek_v4), is tried on small values.
    """
    # A hook may change the layer's input or output.
    if not isinstance(module, nn.Linear) or module._forward_hooks or module._forward_pre_hooks:
        return False
    if getattr(module.forward, "__func__", None) is nn.Linear.forward:
        return True
    # 7 x 11: primes, so that a product by groups of features fails or differs. On the CPU, whatever
    # torch's default device is.
    weight = torch.sin(torch.arange(77.0, device="cpu")).view(7, 11)
    x = torch.eye(11, device="cpu")[None]
    bias = None if module.bias is None else weight[:, 0]
    # A shallow copy: only its dict of parameters is replaced.
    small = copy.copy(module)
    vars(small)["_parameters"] = module._parameters | {"weight": weight, "bias": bias}
    try:
        return torch.allclose(small(x), F.linear(x, weight, bias), atol=1e-5)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return False


def block_linears(model: nn.Module, *, by_class_alone: bool = False) -> list[str]:
    """The paths of all linear layers inside the decoder blocks, in the order of the model.

    by_class_alone: instead the layers that have the class and compute something else.
    """
    inside = {*find_blocks(model).modules()}
    paths: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear) or module not in inside:
            continue
        if is_linear(module) != by_class_alone:
            paths.append(path)
    return paths


def read_directly(model: nn.Module) -> list[str]:
    """The paths of the blocks' linear layers whose weight or bias another module reads.

    A Mamba layer does so. They are found in the modules' source code: a forward pass may read
    others with other kernels, and an adapter must be the same on every machine.
    """
    inside = {*find_blocks(model).modules()}
    read: set[str] = set()
    for path, module in model.named_modules():
        if module not in inside:
            continue
        for child, switches in _reads(type(module)):  # type: ignore[arg-type]
            # An attribute that the module does not have counts as true: rather one layer without
            # an adapter than a weight that is read past it.
            if all(getattr(module, switch, True) for switch in switches):
                read.add(f"{path}.{child}")
    return [path for path in block_linears(model) if path in read]


@functools.cache
def _reads(kind: type[nn.Module]) -> set[tuple[str, frozenset[str]]]:
    """The children whose weight or bias a module of this class reads, each with its conditions.

    A pair is (path of the child, the module's attributes that must be true).
    """
    reads: set[tuple[str, frozenset[str]]] = set()
    classes = [base for base in kind.__mro__ if not base.__module__.startswith("torch.")]
    for base in classes:
        for name, method in vars(base).items():
            # Weights are read there, too, but only to set them.
            if not inspect.isfunction(method) or re.search("init|reset", name):
                continue
            with contextlib.suppress(OSError, SyntaxError):  # functions without a source file
                # A method's source is indented: below an `if` it is valid by itself.
                tree = ast.parse("if True:\n" + textwrap.indent(inspect.getsource(method), " "))
                reads.update(_reads_below(tree, frozenset()))
    return reads


def _reads_below(node: ast.AST, switches: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    if isinstance(node, ast.Attribute):
        read = _READ.fullmatch(ast.unparse(node))
        if read:
            yield read[1], switches
    for child in ast.iter_child_nodes(node):
        conditions: list[str] = []
        # The conditions of an `if` hold in its body, not in its test or its `else`.
        if isinstance(node, ast.If) and child in node.body:
            conditions = _SWITCH.findall(ast.unparse(node.test))
        yield from _reads_below(child, switches.union(conditions))


def has_tied_embeddings(model: PreTrainedModel) -> bool:
    head = model.get_output_embeddings()
    # By identity, whatever the configuration says: this is what is sharded and saved.
    return head is not None and head.weight is model.get_input_embeddings().weight


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(path, buffer) of the buffers that weight files contain."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            # torch has no public way to ask for this.
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer
