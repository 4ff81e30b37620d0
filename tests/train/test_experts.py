"""Mixtures of experts: the balancing loss, and weights that transformers keeps fused."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hotseat.errors import UserError
from hotseat.train.backend import Outputs
from hotseat.train.experts import has_experts
from hotseat.train.packing import split_by_count
from hotseat.types import MicroBatch

from .conformance import (
    OPTIONS,
    ClippedLoss,
    assert_close,
    assert_identical,
    copy_weights,
    groups_of_four,
    some_segments,
    tiny_model,
)
from .fsdp_factory import make
from .test_policy_models import small

MIXTURES: dict[str, dict[str, Any]] = {
    "MixtralConfig": {"num_local_experts": 4, "initializer_range": 0.2},
    "Qwen2MoeConfig": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "Qwen3MoeConfig": {"num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2},
}
BALANCED = replace(OPTIONS, aux_loss_coefficient=0.1)


class Nothing:
    """A loss without a gradient of its own: what is learned is the balance of the experts."""

    def __call__(self, outputs: Outputs, batch: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        assert outputs.log_probs is not None
        return outputs.log_probs.sum() * 0.0, {}


def plain_aux_loss(model: Any, batch: MicroBatch) -> float:
    """As transformers computes it, of rows filled up on the right, without the last token of each segment."""
    rows = [
        batch.token_ids[start : end - 1]
        for start, end in zip(batch.offsets.tolist(), batch.offsets.tolist()[1:], strict=False)
    ]
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    with torch.no_grad():
        return float(model(input_ids=input_ids, attention_mask=mask, output_router_logits=True).aux_loss)


@pytest.mark.slow
@pytest.mark.parametrize("config", MIXTURES)
@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_the_balancing_loss_is_that_of_transformers(config: str, layout: Any) -> None:
    model, batch = small(config, **MIXTURES[config]), groups_of_four()
    expected = plain_aux_loss(copy.deepcopy(model).eval(), batch)
    backend = make(model, replace(BALANCED, layout=layout))
    report = backend.update([batch], Nothing(), 1.0)
    assert report.metrics["aux_loss"] == pytest.approx(expected, rel=1e-5)
    assert report.loss == pytest.approx(0.1 * expected, rel=1e-5)
    assert report.grad_norm > 0
    backend.close()


def test_micro_batches_count_by_their_tokens() -> None:
    model, batch = small("MixtralConfig", **MIXTURES["MixtralConfig"]), some_segments()
    work = split_by_count(batch, 4)
    plain = copy.deepcopy(model).eval()
    expected = sum(plain_aux_loss(plain, part) * part.num_tokens for part in work) / batch.num_tokens
    backend = make(model, BALANCED)
    assert backend.update(work, Nothing(), 1.0).metrics["aux_loss"] == pytest.approx(expected, rel=1e-5)
    backend.close()


@pytest.mark.slow
def test_layouts_and_recomputation_change_nothing() -> None:
    found = []
    for change in ({"layout": "padded"}, {"layout": "shared"}, {"gradient_checkpointing": True}):
        backend = make(small("MixtralConfig", **MIXTURES["MixtralConfig"]), replace(BALANCED, **change))
        for _ in range(3):
            backend.update(split_by_count(groups_of_four(), 4), ClippedLoss(), 1.0)
        found.append(copy_weights(backend))
        backend.close()
    assert_close(found[1], found[0])
    assert_close(found[2], found[0])


@pytest.mark.slow
def test_learning_the_balance_evens_the_experts_out() -> None:
    batch = some_segments(24)
    backend = make(small("MixtralConfig", **MIXTURES["MixtralConfig"]), replace(BALANCED, max_grad_norm=None))
    losses = [backend.update([batch], Nothing(), 1.0).metrics["aux_loss"] for _ in range(10)]
    assert losses[-1] < losses[0] - 0.01
    backend.close()


@pytest.mark.parametrize("config", MIXTURES)
def test_fused_experts_are_exported_under_names_that_load(config: str, tmp_path: Path) -> None:
    model = small(config, **MIXTURES[config])
    names = {name for name, _ in model.named_parameters()}
    backend = make(model, BALANCED)
    backend.update([some_segments()], ClippedLoss(), 1.0)
    expected = copy_weights(backend)
    assert expected.keys() == names
    backend.export(tmp_path)
    backend.close()
    # As the model's authors publish it: one matrix for each expert.
    assert any(".experts.0." in name for name in load_file(tmp_path / "model.safetensors"))
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_identical({name: weight.detach() for name, weight in reloaded.named_parameters()}, expected)


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(UserError, match="aux_loss_coef is set, and a Llama is no mixture of experts: remove it"):
        make(tiny_model(), BALANCED)


def test_who_counts_experts_need_not_have_any() -> None:
    assert has_experts(transformers.MixtralConfig())
    assert has_experts(transformers.DogeConfig(is_moe=True))
    assert not has_experts(transformers.DogeConfig())
    assert not has_experts(transformers.LlamaConfig())
