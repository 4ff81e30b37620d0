"""The demo's task and model, as files: see `hotseat.demo`.

python examples/dpo/prepare.py build/dpo --seed 0
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hotseat.demo import make_files

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make_files(options.directory, options.seed, num_layers=3, width=128)
