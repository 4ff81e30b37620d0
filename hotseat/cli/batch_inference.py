"""OpenRLHF's `batch_inference` on Hotseat: answers to prompts, or rewards of answers; rejection sampling and pairs."""

import sys

from hotseat.openrlhf.inference_command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
