"""OpenRLHF's package, for `python -m openrlhf.cli.COMMAND` on Hotseat."""

from hotseat.openrlhf.shim import refuse_another_openrlhf

refuse_another_openrlhf()
