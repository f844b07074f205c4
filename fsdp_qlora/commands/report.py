"""The command `report`: the curves of runs in one HTML file."""

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="a run's --output_dir; also while it trains")
    parser.add_argument("--out", metavar="FILE", help="default: report.html in the run's folder; of several, here")


def run(args: argparse.Namespace) -> None:
    """Draw the curves of runs in one HTML file that needs no network: losses, learning rate, gradient norm, speed,
    memory, time per phase, the data's lengths, samples, settings and what differs between them, environment. Several
    runs are drawn over each other. A run writes its own at its end.
    """
    from fsdp_qlora.observability.report import REPORT_FILE, write_report

    folders = [Path(folder) for folder in args.runs]
    out = Path(args.out or (folders[0] / REPORT_FILE if len(folders) == 1 else REPORT_FILE))
    write_report(folders, out)
    print(out)
