"""RLinf's package: the names that its script for embodied tasks imports, on Hotseat."""

from hotseat.rlinf.shim import SHIM

SHIM.refuse_another()
