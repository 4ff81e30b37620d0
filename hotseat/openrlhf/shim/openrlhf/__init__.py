"""OpenRLHF's package, for `python -m openrlhf.cli.COMMAND` on Hotseat."""

from hotseat.openrlhf.shim import SHIM

SHIM.refuse_another()
