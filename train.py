"""Fine-tune a language model whose quantized weights are sharded over all ranks: `python train.py --help`.

Options, then one process per GPU, then the run itself, which fsdp_qlora/run.py tells in its order.
"""

import os
import sys

from fsdp_qlora.cli import parse_train_config
from fsdp_qlora.errors import TrainingError, UserError
from fsdp_qlora.launch import relaunch_if_needed
from fsdp_qlora.redact import guard_output, redact_values


def main(argv: list[str]) -> int:
    """Returns the exit status: 0 only when the run finished, 2 for bad input, 1 for a run that had to stop."""
    guard_output()
    try:
        config = parse_train_config(argv)
        if not config.dry_run and (status := relaunch_if_needed(config, argv)) is not None:
            return status
        sys.argv = redact_values(sys.argv)  # wandb keeps a copy
        # Imported here so that --help and wrong options answer at once.
        from fsdp_qlora.run import run

        run(config)
    except (UserError, TrainingError) as error:
        # Every rank says why: one that stops first must not hide the reason of the others.
        rank = f"[rank {os.environ['RANK']}] " if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""
        print(f"{rank}error: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
