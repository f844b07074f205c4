"""The command `env`: facts for a bug report."""

import argparse


def run(args: argparse.Namespace) -> None:
    """Print facts for a bug report: versions, the environment variables that change a run, and the machine, GPUs and
    driver as torch.utils.collect_env has them. Values of secret variables, tokens and passwords in addresses are left
    out.
    """
    from fsdp_qlora.utils.environment import describe_machine, variables, versions

    for name, text in (versions() | variables()).items():
        print(f"{name}: {text}")
    print(describe_machine())
