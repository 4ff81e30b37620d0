"""What the plan says of linear attention: parameters, adapters, and the memory in which its rule is computed."""

from __future__ import annotations

import weakref
from typing import Any

import delta_nets
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hotseat.algorithms.delta_rule import CHUNK
from hotseat.placement import memory_terms as assumed
from hotseat.placement.shapes import from_hf_config
from hotseat.train.backend import LoraOptions, TrainOptions
from hotseat.train.linear_attention import _rule
from hotseat.train.policy_models import prepare_model


def test_the_plan_counts_parameters_and_adapters_as_they_are() -> None:
    model = delta_nets.tiny(tie_word_embeddings=True)
    shape = from_hf_config(model.config.to_dict())
    assert shape.num_parameters == sum(weight.numel() for weight in model.parameters())
    in_layers = [module.weight for module in model.model.layers.modules() if isinstance(module, torch.nn.Linear)]
    assert shape.num_matrix_parameters == sum(weight.numel() for weight in in_layers)
    assert shape.num_largest_matrix == max(weight.numel() for weight in in_layers)
    adapted, _ = prepare_model(model, TrainOptions(lora=LoraOptions(3)), torch.device("cpu"))
    trained = sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)
    assert shape.num_adapter_parameters(3) == trained


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors that were made inside and lived at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._known:
                storage = tensor.untyped_storage()
                self._known.add(storage._cdata)
                self._now += storage.nbytes()
                self.peak = max(self.peak, self._now)
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        return made

    def _forget(self, name: int, num_bytes: int) -> None:
        self._known.discard(name)
        self._now -= num_bytes


@pytest.mark.parametrize("dims", [(64, 64), (128, 64), (128, 128)])
def test_the_plan_knows_the_memory_of_the_rule(dims: tuple[int, int]) -> None:
    settings = {"linear_num_key_heads": 4, "linear_key_head_dim": dims[0], "linear_value_head_dim": dims[1]}
    model = delta_nets.tiny(**settings)
    layer, num_tokens = model.model.layers[0].linear_attn, 4 * 64
    shape = from_hf_config(model.config.to_dict())
    convolved = torch.randn(4, 64, layer.conv_dim, requires_grad=True)
    decay, beta = (torch.rand(4, 64, 4).requires_grad_() for _ in range(2))
    assert assumed.RULE_CHUNK == CHUNK
    for share in (assumed.RULE_FORWARD, 1.0):
        [term] = assumed.delta_rule("actor", shape, num_tokens, share)
        with LiveBytes() as live, torch.set_grad_enabled(share == 1.0):
            read = _rule(layer, convolved, -decay, beta, (1, 1, 1, 1))
            if share == 1.0:
                read.sum().backward()
        assert live.peak == pytest.approx(term.gib * 2**30, rel=0.15)
