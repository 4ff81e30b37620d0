"""RLinf's cluster, workers, channels and placement strategies."""

from hotseat.rlinf import *  # noqa: F403
