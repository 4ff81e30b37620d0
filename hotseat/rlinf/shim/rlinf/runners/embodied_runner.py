"""RLinf's runner of embodied tasks."""

from hotseat.rlinf.embodied import EmbodiedRunner as EmbodiedRunner
