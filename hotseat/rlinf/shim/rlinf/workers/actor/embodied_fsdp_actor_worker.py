"""RLinf's actor of embodied tasks."""

from hotseat.rlinf.embodied import EmbodiedFSDPActor as EmbodiedFSDPActor
