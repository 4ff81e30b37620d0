"""RLinf's actors, by the name of older versions."""

from hotseat.rlinf.embodied import EmbodiedFSDPActor as EmbodiedFSDPActor
