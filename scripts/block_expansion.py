"""The 2024 program's name for `fsdp-qlora expand`.

python scripts/block_expansion.py --model_name meta-llama/Llama-2-7b-hf --output_dir expanded
--expansion_rate 0.1
"""

import sys

from fsdp_qlora.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["expand", *sys.argv[1:]]))
