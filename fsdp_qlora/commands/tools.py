"""Commands of a few lines that need no model: report, configs, completion, env and doctor."""

import argparse
from pathlib import Path

from fsdp_qlora.config.options import option_types
from fsdp_qlora.config.text import describe_config, shipped_configs
from fsdp_qlora.run.machine import check_machine
from fsdp_qlora.utils.errors import UserError


def report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN_DIR",
        help="folder of a run (its --output_dir), finished or in training",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="file to write (default: report.html in the run's folder, or for several runs in the "
        "current folder)",
    )


def report(args: argparse.Namespace) -> None:
    """Draw the curves of runs in one HTML file that needs no network: losses, learning rate,
    gradient norm, speed, memory, time per phase, row lengths, samples, environment, and the
    settings with their differences. Several runs share the axes. Each run writes its own report at
    its end.
    """
    from fsdp_qlora.observability.page.report import REPORT_FILE, write_report

    folders = [Path(folder) for folder in args.runs]
    out = Path(args.out or (folders[0] / REPORT_FILE if len(folders) == 1 else REPORT_FILE))
    write_report(folders, out)
    print(out)


def configs_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="settings to print")


def configs(args: argparse.Namespace) -> None:
    """List the settings that come with the program; `fsdp-qlora train --config NAME` uses them.
    With NAME, print these settings, to be saved as a file and changed.
    """
    paths = shipped_configs()
    if args.name is None:
        for name, path in paths.items():
            print(f"{name:20}{describe_config(path)}")
    elif args.name in paths:
        print(paths[args.name].read_text(encoding="utf-8"), end="")
    else:
        raise UserError(f"No settings are named {args.name!r}. There are: {', '.join(paths)}.")


def completion(args: argparse.Namespace) -> None:
    """Print the shell completion setup, a line for ~/.bashrc. In ~/.zshrc, put `autoload -U
    bashcompinit; bashcompinit` before it.
    """
    words = " ".join([*args.commands, *(f"--{name}" for name in option_types())])
    print(f'complete -o default -W "{words}" fsdp-qlora')


def env(args: argparse.Namespace) -> None:
    """Print facts for a bug report: versions, the environment variables that change a run, and the
    machine, GPUs and driver as torch.utils.collect_env has them. Values of secret variables, tokens
    and passwords in addresses are left out.
    """
    from fsdp_qlora.utils.environment import describe_machine, variables, versions

    for name, text in (versions() | variables()).items():
        print(f"{name}: {text}")
    print(describe_machine())


def doctor(args: argparse.Namespace) -> int:
    """Check this machine before a run, one line per check: ok, or FIX and what to do. The checks
    are the GPUs and their kernels, what two ranks send each other (with NCCL on GPUs, else with
    gloo), memory, disk and logins. A check takes at most two minutes; all run without a GPU too.
    The exit status is 1 if something must be fixed. `env` prints facts for a bug report.
    """
    is_all_fine = True
    for name, sentence, is_fine in check_machine():
        # Flushed: a check may take a minute, and the lines before it say how far it is.
        print(f"{'ok' if is_fine else 'FIX':4}  {name:14}  {sentence}", flush=True)
        is_all_fine &= is_fine
    return 0 if is_all_fine else 1
