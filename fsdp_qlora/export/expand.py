"""Block expansion (LLaMA Pro, Wu et al. 2024).

Adds copies of decoder blocks that are identities until trained.

A new block is a copy of the block before it with zeros in the output projections of attention and
MLP. It adds nothing to the residual stream, so the expanded model computes the same function. The
indices of the new blocks are recorded in config.json (NEW_BLOCKS).
"""

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from fsdp_qlora.export.model_folder import (
    build_plain_model,
    check_is_new,
    new_model_folder,
    new_weights,
    read_pieces,
)
from fsdp_qlora.model.architecture.config import NEW_BLOCKS, load_config
from fsdp_qlora.model.architecture.decoder import find_blocks
from fsdp_qlora.model.experts import loops_over_experts
from fsdp_qlora.model.formats.methods import take_format
from fsdp_qlora.model.quantizers.routed import is_transposed
from fsdp_qlora.sharding.loading.heads import settle_head
from fsdp_qlora.sharding.loading.load_weights import describe_left_out, match_tensors
from fsdp_qlora.sharding.loading.weight_files import WeightFiles
from fsdp_qlora.utils import hub
from fsdp_qlora.utils.errors import UserError

log = logging.getLogger("fsdp_qlora")


def expand_model(model_name: str, out: Path, *, expansion_rate: float) -> None:
    """Write a model folder with `expansion_rate` * blocks new blocks.

    It computes the same function.

    Memory holds one piece of a tensor at a time, and one block to check the identity.
    """
    check_is_new(out)
    folder = hub.find_model_folder(model_name, with_weights=True)
    config = load_config(folder, model_name)
    packed = take_format(config, model_name, folder)
    # A configuration may be left over, with files in which nothing is quantized.
    if packed and packed.scaled != set():
        raise UserError(
            f"model_name {model_name} is quantized. Give the model with 16- or 32-bit weights."
        )
    settle_head(config, folder)
    origins = block_origins(config.get_text_config().num_hidden_layers, expansion_rate)
    expanded_config = _expand_config(config, origins)
    model = build_plain_model(config, torch.bfloat16)
    expanded = build_plain_model(expanded_config, torch.bfloat16)
    added: list[int] = getattr(expanded_config, NEW_BLOCKS)
    zeros = {index: _output_weights(find_blocks(expanded)[index], config) for index in added}
    weight_files = WeightFiles(folder)
    copies, empty = _plan_copies(model, expanded, weight_files, origins, zeros)
    # Blocks with the same weights at zero are built alike, so one of each kind is checked. The
    # check changes its model.
    for index in {tuple(names): index for index, names in zeros.items()}.values():
        _check_identity(build_plain_model(expanded_config, torch.bfloat16), index, zeros[index])
    forms = {name: weight_files.form(source) for name, source in copies.items()}
    with new_model_folder(out, folder, json.loads(expanded_config.to_json_string())) as partial:
        # The files are zeros at first, and stay so for the output projections of new blocks.
        files = new_weights(partial, forms)
        filled = {name: source for name, source in copies.items() if name not in empty}
        for name, part, content in read_pieces(weight_files, filled, "Copying"):
            files.write(name, part.start * content.element_size(), content)
    log.info("It has %d blocks; new: %s", len(origins), ", ".join(map(str, added)))


def block_origins(num_blocks: int, expansion_rate: float) -> list[int]:
    """For each block of the expanded model, return its original block.

    The second of two equal numbers is the copy.

    Copies are spread evenly, the last at the end: each ends a group of blocks of about the same
    size.
    """
    # The product of a share such as 0.29 may be just below a whole number.
    count = int(num_blocks * expansion_rate + 1e-9)
    if not 1 <= count <= num_blocks:
        raise UserError(
            f"--expansion_rate {expansion_rate} would add {count} blocks to the model's "
            f"{num_blocks}. Give a share of new blocks from {1 / num_blocks:.3g} (one block) to 1."
        )
    copied = {(group + 1) * num_blocks // count - 1 for group in range(count)}
    origins = []
    for block in range(num_blocks):
        origins.append(block)
        if block in copied:
            origins.append(block)
    return origins


def _expand_config(config: PretrainedConfig, origins: Sequence[int]) -> PretrainedConfig:
    """The configuration with the blocks of `origins`.

    It has their number, and every list with an entry per block.
    """
    content = config.to_dict()
    text = config.get_text_config()
    inside = content
    if text is not config:
        # The part for text, under the name that the configuration's class has for it.
        inside = next(content[name] for name in content if vars(config).get(name) is text)
    num_blocks = text.num_hidden_layers
    for name, value in inside.items():
        # A list of end tokens may be as long as there are blocks.
        is_of_tokens = name.endswith(("_token_id", "_ids"))
        if isinstance(value, list | tuple) and len(value) == num_blocks and not is_of_tokens:
            inside[name] = [value[origin] for origin in origins]
    # Some configurations have another name for the number of blocks (n_layer).
    inside[text.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = len(origins)
    # The second of two equal numbers is the copy.
    content[NEW_BLOCKS] = [
        index for index in range(1, len(origins)) if origins[index] == origins[index - 1]
    ]
    # _name_or_path is a local path, of no use to others.
    content.pop("_name_or_path", None)
    return type(config).from_dict(content)


def _output_weights(block: nn.Module, config: PretrainedConfig) -> list[str]:
    """Names of the weights and biases of the output projections of attention and MLP.

    They are relative to the block.

    In each module of the block that is the last layer whose output is as wide as the residual
    stream.
    """
    width = config.get_text_config().hidden_size
    names = []
    for path, module in block.named_modules():
        children = module.named_children()
        outputs = [
            name
            for name, child in children
            if isinstance(child, nn.Linear) and child.out_features == width
        ]
        if loops_over_experts(module):
            # The dim of outputs: [experts, in, out] or [experts, out, in].
            axis = 2 if is_transposed(module) else 1
            shapes = {
                name: parameter.shape for name, parameter in module.named_parameters(recurse=False)
            }
            outputs_of_experts = [
                name for name, shape in shapes.items() if len(shape) == 3 and shape[axis] == width
            ]
            if outputs_of_experts:
                last = outputs_of_experts[-1]
                names += [f"{path}.{name}" for name in (last, f"{last}_bias") if name in shapes]
        elif outputs:
            # At the top of the block the path is empty.
            layer = f"{path}.{outputs[-1]}".lstrip(".")
            names += [
                f"{layer}.{name}" for name, _ in block.get_submodule(layer).named_parameters()
            ]
    return names


def _plan_copies(
    model: PreTrainedModel,
    expanded: PreTrainedModel,
    weight_files: WeightFiles,
    origins: Sequence[int],
    zeros: dict[int, list[str]],
) -> tuple[dict[str, str], set[str]]:
    """Name in the expanded model's files -> its source in the model's files.

    Also returns the names of the tensors that stay at 0.
    """
    blocks = find_blocks(model)
    path = next(path for path, module in model.named_modules() if module is blocks)
    leaf = path.rpartition(".")[2]
    shapes = {name: tensor.shape for name, tensor in expanded.state_dict().items()}
    old_shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    copies: dict[str, str] = {}
    empty: set[str] = set()
    weights = match_tensors(model, weight_files)
    line = describe_left_out(weights, model, in_result="The result lacks them.")
    if line:
        log.warning("%s", line)
    for name, source in weights.sources.items():
        parts = list(weight_files.origins(source))
        # Experts are separate tensors in the files, under their own names.
        names = {part: name if len(parts) == 1 and part == source else part for part in parts}
        block = re.match(rf"{re.escape(path)}\.(\d+)\.(.*)", name)
        if block is None:
            copies |= {new: part for part, new in names.items()}
            continue
        for index, origin in enumerate(origins):
            if origin != int(block[1]):
                continue
            target = f"{path}.{index}.{block[2]}"
            if shapes.get(target) != old_shapes[name]:
                raise UserError(
                    f"The model's blocks differ, and {target} of the expanded model has another "
                    f"shape than {name} of this one. Give an --expansion_rate that keeps the "
                    "pattern of blocks, or another model."
                )
            for part, new in names.items():
                # The files' names may have another prefix than the model's.
                new = re.sub(rf"(^|\.){leaf}\.{block[1]}\.", rf"\g<1>{leaf}.{index}.", new, count=1)
                copies[new] = part
                if block[2] in zeros.get(index, ()):
                    empty.add(new)
    return copies, empty


def _check_identity(model: PreTrainedModel, index: int, zeros: Sequence[str]) -> None:
    """Check on random values that a block with these weights at zero is an identity.

    Raises UserError if not.
    """
    blocks = find_blocks(model)
    block = blocks[index]
    path, _, leaf = next(
        path for path, module in model.named_modules() if module is blocks
    ).rpartition(".")
    # The parent runs with this block alone: one block's weights in memory.
    parent = model.get_submodule(path)
    setattr(parent, leaf, nn.ModuleList([block]))
    values = {}
    for name, parameter in parent.named_parameters():
        # The block gets hidden states, so that the largest tensor is not needed.
        if parameter is model.get_input_embeddings().weight:
            continue
        random = torch.randn(parameter.shape, dtype=parameter.dtype)
        is_zero = name.removeprefix(f"{leaf}.0.") in zeros
        values[name] = torch.zeros_like(random) if is_zero else random * 0.02
    states: list[Any] = []
    block.register_forward_hook(
        lambda module, args, kwargs, output: states.extend(
            [args[0] if args else kwargs["hidden_states"], output]
        ),
        with_kwargs=True,
    )
    hidden = torch.randn(1, 3, model.get_input_embeddings().embedding_dim, dtype=torch.bfloat16)
    torch.func.functional_call(parent, values, kwargs={"inputs_embeds": hidden, "use_cache": False})
    inputs, output = states
    output = output[0] if isinstance(output, tuple) else output
    # x + 0 is x to the bit, in every dtype.
    if not torch.equal(inputs, output):
        raise UserError(
            f"{type(model).__name__} cannot be expanded: a block with zeros in {', '.join(zeros)} "
            "changes its input. Give a model of another family."
        )
