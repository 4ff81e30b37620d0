"""RLinf's placement of components."""

from hotseat.rlinf import HybridComponentPlacement as HybridComponentPlacement
from hotseat.rlinf import ModelParallelComponentPlacement as ModelParallelComponentPlacement
