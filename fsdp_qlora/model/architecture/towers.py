"""The encoders of images in a model's towers, and the linear layers there, found by structure."""

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from fsdp_qlora.config.text import TOWERS
from fsdp_qlora.model.architecture.decoder import find_towers
from fsdp_qlora.model.architecture.structure import is_linear

_SOUND = "audio"  # in the paths of the parts for sound, which no row passes


def tower_linears(model: PreTrainedModel) -> dict[str, list[str]]:
    """Word -> paths of the linear layers for images that can have an adapter.

    vision: those of the encoders' blocks. projector: those behind the blocks, whatever modules they
    are in. Layers before the blocks, which take patches, and pooling heads are in neither.
    """
    found: dict[str, list[str]] = {word: [] for word in TOWERS}
    for path, tower in find_towers(model).items():
        if _SOUND in path:
            continue
        blocks = encoder_blocks(tower)
        in_blocks = {*blocks.modules()} if blocks is not None else set()
        before_blocks = blocks is not None
        left_out = _pooling(tower)
        for inner, module in tower.named_modules():
            if module in in_blocks:
                before_blocks = False
            if before_blocks or module in left_out or not is_linear(module):
                continue
            word = "vision" if module in in_blocks else "projector"
            found[word].append(f"{path}.{inner}".rstrip("."))
    return found


def encoder_blocks(tower: nn.Module) -> nn.ModuleList | None:
    """The blocks of a tower's encoder; None if it has no encoder, such as a projector.

    The encoder is a model of transformers. Its blocks are the list with as many modules as it has
    layers; without such a list, or among several, the one with the most parameters.
    """
    encoders = (module for module in tower.modules() if isinstance(module, PreTrainedModel))
    encoder = next(encoders, None)
    if encoder is None:
        return None
    count = getattr(encoder.config, "num_hidden_layers", getattr(encoder.config, "depth", 0))

    def rank(blocks: nn.ModuleList) -> tuple[bool, int]:
        num_parameters = sum(parameter.numel() for parameter in blocks.parameters())
        return len(blocks) == count, num_parameters

    lists = [each for each in encoder.modules() if isinstance(each, nn.ModuleList) and len(each)]
    return max(lists, key=rank, default=None)


def blocks_of_towers(model: PreTrainedModel) -> Iterator[nn.ModuleList]:
    """Yield the list of blocks of each encoder of images."""
    for path, tower in find_towers(model).items():
        blocks = encoder_blocks(tower)
        if blocks is not None and _SOUND not in path:
            yield blocks


def _pooling(tower: nn.Module) -> set[nn.Module]:
    """The modules of heads that pool by torch's own attention, which reads weights itself.

    Siglip has one. Images that are shown to a decoder do not pass it.
    """
    inside: set[nn.Module] = set()
    for module in tower.modules():
        if any(isinstance(child, nn.MultiheadAttention) for child in module.children()):
            inside.update(module.modules())
    return inside
