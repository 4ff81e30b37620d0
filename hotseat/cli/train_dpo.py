"""OpenRLHF's `train_dpo` on Hotseat. Preference optimisation."""

from hotseat.openrlhf.run import entry

if __name__ == "__main__":
    entry("train_dpo")
