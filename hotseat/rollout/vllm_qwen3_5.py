"""vLLM's class for the text of Qwen3.5, complete in all versions. vLLM imports it by its name, in every process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from hotseat.rollout.vllm_images import without_torchvision

with without_torchvision():
    from vllm.model_executor.models import qwen3_5 as theirs
from vllm.model_executor.models.interfaces import IsHybrid
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

_WITH_IMAGES: Any = theirs.Qwen3_5ForConditionalGeneration.__dict__


class Qwen3_5ForCausalLM(theirs.Qwen3_5ForCausalLM, IsHybrid):
    """Qwen3.5 for text, of checkpoints with a visual encoder and without."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={"model.language_model.": "model.", "model.visual.": None, "mtp.": None}
    )
    get_mamba_state_dtype_from_config = _WITH_IMAGES["get_mamba_state_dtype_from_config"]
    get_mamba_state_shape_from_config = _WITH_IMAGES["get_mamba_state_shape_from_config"]
    get_mamba_state_copy_func = _WITH_IMAGES["get_mamba_state_copy_func"]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded: set[str] = AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
        return loaded
