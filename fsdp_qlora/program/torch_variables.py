"""Environment variables that torch reads when it is imported or first uses a GPU, for the commands that run a model."""

import os


def set_torch_variables() -> None:
    """Set what is right for every run, unless the user has set it. Call it before torch is imported."""
    # Steps and prompts differ in length, and would cut fixed segments up. bitsandbytes initializes CUDA on import.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the old name
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # A rank that is gone is one sentence from us; torch would add pages of C++ frames.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
