"""RLinf's package: the names that its script for embodied tasks imports, on Hotseat."""

from hotseat.rlinf.shim import refuse_another_rlinf

refuse_another_rlinf()
