"""RLinf's workers of reward models."""

from hotseat.rlinf.embodied import EmbodiedAPIRewardWorker as EmbodiedAPIRewardWorker
from hotseat.rlinf.embodied import EmbodiedRewardWorker as EmbodiedRewardWorker
