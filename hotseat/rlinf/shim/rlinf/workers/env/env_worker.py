"""RLinf's worker of simulators."""

from hotseat.rlinf.embodied import EnvWorker as EnvWorker
