"""The command `completion`: completes words in bash and zsh."""

import argparse

from fsdp_qlora.config.options import option_types


def run(args: argparse.Namespace) -> None:
    """Print a line for ~/.bashrc that completes words; in ~/.zshrc, `autoload -U bashcompinit; bashcompinit` first."""
    print(
        f'complete -o default -W "{" ".join([*args.commands, *(f"--{name}" for name in option_types())])}" fsdp-qlora'
    )
