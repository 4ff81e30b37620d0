"""OpenRLHF's `train_sft` on Hotseat. Supervised fine-tuning."""

from hotseat.openrlhf.run_command import entry

if __name__ == "__main__":
    entry("train_sft")
