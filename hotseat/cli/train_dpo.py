"""OpenRLHF's `train_dpo` on Hotseat. Preference optimisation."""

from hotseat.openrlhf.run_command import entry

if __name__ == "__main__":
    entry("train_dpo")
