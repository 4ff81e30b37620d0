"""RLinf's worker of rollouts."""

from hotseat.rlinf.embodied import MultiStepRolloutWorker as MultiStepRolloutWorker
