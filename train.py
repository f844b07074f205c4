"""Fine-tune a language model whose quantized weights are sharded over all ranks: `python train.py --help`.

Options, then one process per GPU, then the run itself, which fsdp_qlora/run.py tells in its order.
"""

import os
import sys

from fsdp_qlora.config.cli import parse_train_config
from fsdp_qlora.control import restarts
from fsdp_qlora.errors import ENDINGS, Ending, LostRank, RunStopped, TrainingError, UserError
from fsdp_qlora.launch import relaunch_if_needed
from fsdp_qlora.redact import guard_output, redact_values


def main(argv: list[str]) -> int:
    """Returns the exit status: 0 only when the run is finished, else as in errors.ENDINGS."""
    guard_output()
    # A rank that is gone is one sentence from us; torch would add pages of C++ frames.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if (end := restarts.earlier_end()) is not None:
        status, message = end
        return report(f"not restarted, since the end of the attempt before was final: {message}", status)
    try:
        config = parse_train_config(argv)
        if not config.dry_run and (relaunched := relaunch_if_needed(config, argv)) is not None:
            return relaunched
        sys.argv = redact_values(sys.argv)  # wandb keeps a copy
        # Imported here so that --help and wrong options answer at once.
        from fsdp_qlora.run import run

        run(config)
    except (UserError, TrainingError, RunStopped) as error:
        ending = how_it_ends(error)
        restarts.note_end(ending, str(error))
        return report(str(error), ending.exit_code)
    except LostRank as error:
        return report(str(error), ENDINGS["failed"].exit_code)
    return 0


def how_it_ends(error: Exception) -> Ending:
    if isinstance(error, RunStopped):
        return error.ending
    if isinstance(error, UserError):
        return ENDINGS["bad_input"]
    return ENDINGS["failed"]._replace(is_final=True)  # it would fail again


def report(message: str, status: int) -> int:
    # Every rank says why: one that stops first must not hide the reason of the others.
    rank = f"[rank {os.environ['RANK']}] " if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""
    print(f"{rank}error: {message}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
