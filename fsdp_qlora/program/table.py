"""The table of the program's commands. Each is a row here and a module, which is loaded when the command is used."""

from typing import NamedTuple


class Command(NamedTuple):
    """A command of `fsdp-qlora`.

    summary: one line of `fsdp-qlora --help`. module: it has DESCRIPTION, add_options(parser) and run(args); or, where
    argparse does not read the options or several processes run, main(argv), which returns the exit status. It imports
    torch where it needs it and not at its top, so that --help and wrong options answer at once.
    takes_training_options: run(args, words) gets the other words too, which are options of training.
    """

    summary: str
    module: str
    takes_training_options: bool = False


COMMANDS = {
    "train": Command("fine-tune a model", "fsdp_qlora.program.train"),
    "export": Command("make an adapter of a checkpoint", "fsdp_qlora.program.export"),
    "merge": Command("make an adapter and its base one model", "fsdp_qlora.program.merge", takes_training_options=True),
    "gguf": Command("write a merged model or an adapter for llama.cpp", "fsdp_qlora.program.gguf"),
    "generate": Command("let a trained model answer", "fsdp_qlora.program.generate"),
    "report": Command("draw the curves of runs, side by side, in one HTML file", "fsdp_qlora.program.report"),
    "quantize": Command("save a model in 4 bits", "fsdp_qlora.program.quantize"),
    "expand": Command("add blocks to a model that change nothing until they are trained", "fsdp_qlora.program.expand"),
    "cache": Command("list and prune the cache of quantized weights", "fsdp_qlora.program.cache"),
    "configs": Command("list the settings that come with the program", "fsdp_qlora.program.configs"),
    "env": Command("print what a bug report needs", "fsdp_qlora.program.env"),
}
