"""Linear layers in NF4 inside vLLM (`train.load_in_4bit`): the bytes and scales that the trainer has.

vLLM has no kernel for them in all of its builds, so a layer makes its 16-bit weight in every forward, by the trainer's
own function: slower than 16-bit weights, and on a device a captured graph holds it. Rows are quantised by themselves,
so fused layers hold the rows of each weight as if it were alone.

Importing this module makes the method known to vLLM: in the engine's process and in vLLM's workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from hotseat.algorithms.nf4 import BLOCK, SCALES, dequantise, level_pairs, quantise

NAME = "hotseat_nf4"  # of the method, in vLLM's arguments


@register_quantization_config(NAME)
class Nf4Config(QuantizationConfig):
    """Puts all linear layers in NF4, but neither embeddings nor the head."""

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 70

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Nf4Config:
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Nf4Method | None:
        return Nf4Method() if isinstance(layer, LinearBase) else None


class Nf4Method(LinearMethodBase):
    """How vLLM's linear layers load weights into NF4, and compute with them."""

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: Sequence[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        load_part = attributes.pop("weight_loader")
        num_rows = sum(output_partition_sizes)

        def load(parameter: nn.Parameter, whole: Tensor, *part: Any) -> None:
            packed, scales = quantise(whole.to(parameter.device, params_dtype))
            load_part(parameter, packed, *part)
            load_part(layer.get_parameter(SCALES), scales, *part)

        packed = torch.empty(num_rows, input_size_per_partition // 2, dtype=torch.uint8)
        scales = torch.empty(num_rows, input_size_per_partition // BLOCK, dtype=params_dtype)
        for name, values in (("weight", packed), (SCALES, scales)):
            parameter = nn.Parameter(values, requires_grad=False)
            vars(parameter).update({"input_dim": 1, "output_dim": 0, "weight_loader": load, **attributes})
            layer.register_parameter(name, parameter)
        layer.register_buffer("pairs", level_pairs(), persistent=False)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.linear(x, dequantise(layer.weight, layer.absmax, layer.pairs, x.dtype), bias)
