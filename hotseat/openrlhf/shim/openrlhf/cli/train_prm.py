"""Process reward models: not under OpenRLHF's name."""

from hotseat.openrlhf.shim import refuse_command

refuse_command("train_prm")
