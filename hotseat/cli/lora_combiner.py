"""OpenRLHF's `lora_combiner` on Hotseat: adds a LoRA adapter to its base model."""

import sys

from hotseat.openrlhf.merge_command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
