"""`python -m fsdp_qlora COMMAND` and `torchrun -m fsdp_qlora train`: the program, also where it is not installed."""

import sys

from fsdp_qlora.cli.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
