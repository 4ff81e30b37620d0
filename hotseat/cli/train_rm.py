"""OpenRLHF's `train_rm` on Hotseat. Reward models."""

from hotseat.openrlhf.run import entry

if __name__ == "__main__":
    entry("train_rm")
