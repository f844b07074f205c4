"""Hidden states that towers return, such as those of the block that LLaVA's projector reads."""

from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY


def keep_hidden_states(tower: nn.Module) -> None:
    """Have a sharded tower return hidden states where its model asks for them.

    FSDP2 gives a module a class of its own, and transformers looks up by the name of the class
    which outputs it records.
    """
    for module in tower.modules():
        if isinstance(module, PreTrainedModel):
            # As PreTrainedModel does it for each new model. update() takes the name itself in all
            # releases.
            _CAN_RECORD_REGISTRY.update({str(type(module)): module._can_record_outputs})
