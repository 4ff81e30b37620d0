"""Weights on their way out: their types, and adapters merged into them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from hotseat.train.lora import Adapter
from hotseat.train.outgoing import OutgoingWeights, convert

ADAPTER = Adapter("a", "b", scale=2.0, is_transposed=False)


def outgoing(adapters: dict[str, Adapter], precision: Any = "fp32", **model: Any) -> OutgoingWeights:
    return OutgoingWeights(SimpleNamespace(**model), adapters, precision)  # type: ignore[arg-type]


def test_weights_leave_in_their_own_type_unless_adapters_are_merged_into_them() -> None:
    assert outgoing({}).dtype(None) is None
    assert outgoing({"w": ADAPTER}).dtype(None) == torch.float32
    assert outgoing({"w": ADAPTER}, "bf16").dtype(None) == torch.bfloat16
    assert outgoing({"w": ADAPTER}, "bf16").dtype(torch.float16) == torch.float16


def test_buffers_that_transformers_keeps_in_32_bits_are_not_converted() -> None:
    weights = outgoing({}, _keep_in_fp32_modules_strict=["router"])
    assert weights.buffer_dtype("layers.0.router.bias", torch.bfloat16) is None
    assert weights.buffer_dtype("layers.0.norm.scale", torch.bfloat16) == torch.bfloat16


def test_adapters_are_merged_into_the_rows_of_their_weight_alone() -> None:
    weights = outgoing({"w": ADAPTER})
    assert weights.factor_names() == ["a", "b"]
    merge = weights.merging({"a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([[1.0], [3.0]])})
    # W + 2 B A = 0 + 2 [[1, 2], [3, 6]]; the second row alone.
    assert merge("w", torch.zeros(1, 2), 1).tolist() == [[6.0, 12.0]]
    assert merge("other", torch.ones(1, 2), 1).tolist() == [[1.0, 1.0]]


def test_only_floating_point_numbers_are_converted() -> None:
    assert convert(torch.ones(2), torch.bfloat16).dtype == torch.bfloat16
    assert convert(torch.arange(2), torch.bfloat16).dtype == torch.int64
