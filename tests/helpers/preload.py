"""Imports what a rank needs, once, in the server process that forks the ranks."""

import gc

import transformers.models.llama.modeling_llama  # noqa: F401
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from fsdp_qlora.run.train import run

__all__ = ["run"]

get_checkpoint_conversion_mapping("llama")  # compiles a thousand patterns, once

# A rank's collector would walk through all this and so copy its pages: a third of a tiny run's
# time.
gc.collect()
gc.freeze()
gc.freeze = gc.unfreeze = lambda: None  # the training loop would undo it
