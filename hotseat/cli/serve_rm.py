"""OpenRLHF's `serve_rm` on Hotseat: serves a reward model."""

import sys

from hotseat.openmp import wait_passively
from hotseat.openrlhf.serve_command import main

if __name__ == "__main__":
    wait_passively()
    sys.exit(main(sys.argv[1:]))
