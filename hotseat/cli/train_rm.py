"""OpenRLHF's `train_rm` on Hotseat. Reward models."""

from hotseat.openrlhf.run_command import entry

if __name__ == "__main__":
    entry("train_rm")
