"""The command `env`: what a bug report needs."""

import argparse
import json


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> None:
    """Print what a bug report needs: versions, machine, GPUs, driver, and the environment variables that change a run.
    Values of secret variables, tokens and passwords in addresses are left out.
    """
    from fsdp_qlora.utils.environment import describe_environment

    facts = describe_environment()
    if args.json:
        print(json.dumps(facts, indent=2))
        return
    for heading, values in facts.items():
        print(f"{heading}:")
        for name, text in values.items():
            print(f"  {name}: {text}")
