"""Experts of mixtures in the trainer: computed together, and taken as an engine recorded them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

from hotseat.algorithms.routing import ROUTING, RoutingRecorder, RoutingShape, check_replay, routers, unknown_routing
from hotseat.errors import UnsupportedError
from hotseat.train.backend import LoraOptions, TrainOptions
from hotseat.train.packing import split_by_count
from hotseat.types import MicroBatch

from .conformance import OPTIONS, ClippedLoss, assert_close, copy_weights, groups_of_four, some_choices, some_segments
from .fsdp_factory import make
from .test_compile import some_batches, train
from .test_policy_models import small

MIXTURES: dict[str, dict[str, Any]] = {
    "MixtralConfig": {"num_local_experts": 4, "initializer_range": 0.2},
    "Qwen3MoeConfig": {"num_experts": 6, "moe_intermediate_size": 16, "num_experts_per_tok": 3},
}
REPLAYING = replace(OPTIONS, replays_routing=True)


class FixedChoice(torch.nn.Module):
    """A router that takes the experts that it is given, written out from the definition of the family."""

    def __init__(self, router: Any, ids: Tensor, normalises: bool):
        super().__init__()
        self.weight, self.ids, self.normalises = router.weight, ids.long(), normalises

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = functional.linear(hidden.flatten(0, -2), self.weight)
        exponents = (logits - logits.max(-1, keepdim=True).values).exp()
        chosen = torch.stack([row[ids] for row, ids in zip(exponents, self.ids, strict=True)])
        return logits, chosen / (chosen if self.normalises else exponents).sum(-1, keepdim=True), self.ids


def with_own_choices(model: Any, batch: MicroBatch) -> MicroBatch:
    """Add the experts that a plain forward of each segment takes."""
    recorder, parts = RoutingRecorder(model), []
    for begin, end in zip(batch.offsets.tolist(), batch.offsets.tolist()[1:], strict=False):
        with torch.no_grad():
            model(input_ids=batch.token_ids[None, begin:end])
        parts.append(recorder.last())
    return replace(batch, fields={**batch.fields, ROUTING: torch.cat(parts)})


def log_probs_and_weights(model: Any, options: TrainOptions, batch: MicroBatch) -> dict[str, Tensor]:
    backend = make(model, options)
    [scores] = backend.log_probs([batch], 1.0)
    backend.update(split_by_count(batch, 4), ClippedLoss(), 1.0)
    found = copy_weights(backend) | {"log_probs": scores}
    backend.close()
    return found


@pytest.mark.parametrize("config", MIXTURES)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_grouped_matmuls_equal_a_loop_over_experts(config: str, layout: Any) -> None:
    grouped, loop = small(config, **MIXTURES[config]), small(config, **MIXTURES[config])
    assert grouped.config._experts_implementation == "grouped_mm"
    loop.set_experts_implementation("eager")
    options, batch = replace(OPTIONS, layout=layout), groups_of_four()
    assert_close(
        log_probs_and_weights(grouped, options, batch), log_probs_and_weights(loop, options, batch), tolerance=1e-5
    )


@pytest.mark.parametrize("config", MIXTURES)
@pytest.mark.parametrize(
    "change",
    [
        {"layout": "padded"},
        {"layout": "packed"},
        {"layout": "packed", "gradient_checkpointing": True},
        {"layout": "packed", "lora": LoraOptions(2, 4)},
    ],
    ids=["padded", "packed", "recomputed", "lora"],
)
def test_replaying_its_own_choices_changes_nothing(config: str, change: dict[str, Any]) -> None:
    batch = some_segments()
    chosen = with_own_choices(small(config, **MIXTURES[config]).eval(), batch)
    expected = log_probs_and_weights(small(config, **MIXTURES[config]), replace(OPTIONS, **change), batch)
    found = log_probs_and_weights(small(config, **MIXTURES[config]), replace(REPLAYING, **change), chosen)
    assert_close(found, expected, tolerance=1e-5)


@pytest.mark.long
def test_compiled_layers_replay_alike() -> None:
    """In fp32 on a CPU torch's fallback of grouped matmuls breaks graphs, so how often layers compile says nothing."""
    text = small("MixtralConfig", **MIXTURES["MixtralConfig"]).config
    batches = [some_choices(text, batch) for batch in some_batches(9, 6, 11)]
    options = replace(REPLAYING, layout="packed")
    expected, _ = train(small("MixtralConfig", **MIXTURES["MixtralConfig"]), options, batches, None, has_flash=False)
    compiler = CompileCounterWithBackend("aot_eager")
    found, counts = train(
        small("MixtralConfig", **MIXTURES["MixtralConfig"]), options, batches, compiler, has_flash=False
    )
    assert_close(found, expected, tolerance=1e-5)
    assert counts[0] > 0


@pytest.mark.parametrize("config", MIXTURES)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_recorded_experts_are_taken_and_routers_learn(config: str, layout: Any) -> None:
    model, plain = small(config, **MIXTURES[config]), small(config, **MIXTURES[config]).eval()
    batch = some_choices(model.config, some_segments())
    shape, normalises = RoutingShape.of(plain.config), getattr(plain.config, "norm_topk_prob", True)
    total, expected = 0.0, []
    for segment in range(batch.num_segments):
        begin, end = batch.offsets[segment : segment + 2].tolist()
        alone = copy.copy(plain)
        ids = batch.fields[ROUTING][begin : end - 1].view(-1, shape.num_layers, shape.num_chosen)
        kept = dict(routers(plain))
        for layer, router in kept.items():
            alone.model.layers[layer].mlp.gate = FixedChoice(router, ids[:, layer], normalises)
        if end - begin > 1:
            scores = alone(input_ids=batch.token_ids[None, begin : end - 1]).logits[0].log_softmax(-1)
            scores = scores.gather(1, batch.token_ids[begin + 1 : end, None])[:, 0]
            expected.append(torch.where(batch.mask[begin + 1 : end], scores, 0.0))
            total = total + (expected[-1] * batch.weights[begin + 1 : end]).sum()
        for layer, router in kept.items():
            plain.model.layers[layer].mlp.gate = router
    (-total).backward()

    backend = make(model, replace(REPLAYING, layout=layout, max_grad_norm=None))
    [scores] = backend.log_probs([batch], 1.0)
    firsts = torch.zeros(batch.num_tokens, dtype=torch.bool)
    firsts[batch.offsets[:-1]] = True
    torch.testing.assert_close(scores[~firsts], torch.cat(expected).detach(), rtol=0, atol=1e-5)

    class Plain:
        def __call__(self, outputs: Any, part: MicroBatch) -> Any:
            return -(outputs.log_probs * part.weights * part.mask).sum(), {}

    gradient = torch.stack([weight.grad.norm() for weight in plain.parameters() if weight.grad is not None]).norm()
    assert backend.update([batch], Plain(), 1.0).grad_norm == pytest.approx(float(gradient), rel=1e-4)
    assert all(float(router.weight.grad.abs().max()) > 1e-4 for router in routers(plain).values())
    backend.close()


def test_tokens_without_a_record_choose_for_themselves() -> None:
    batch = some_segments()
    expected = log_probs_and_weights(small("MixtralConfig", **MIXTURES["MixtralConfig"]), OPTIONS, batch)
    unknown = unknown_routing(batch.num_tokens, torch.zeros(1, 4, dtype=torch.uint8))
    for fields in ({}, {ROUTING: unknown}):
        model = small("MixtralConfig", **MIXTURES["MixtralConfig"])
        there = replace(batch, fields={**batch.fields, **fields})
        assert_close(log_probs_and_weights(model, REPLAYING, there), expected, tolerance=1e-6)


def test_other_experts_give_other_log_probs() -> None:
    model, batch = small("MixtralConfig", **MIXTURES["MixtralConfig"]), some_segments()
    backend = make(model, REPLAYING)
    own, other = backend.log_probs([batch], 1.0), backend.log_probs([some_choices(model.config, batch)], 1.0)
    assert float((own[0] - other[0]).abs().max()) > 1e-3
    backend.close()


def test_ids_have_room_for_unknown_ones() -> None:
    assert (RoutingShape(48, 8, 128).dtype, RoutingShape(48, 8, 128).bytes_per_token) == ("uint8", 384)
    assert (RoutingShape(2, 2, 255).dtype, RoutingShape(2, 2, 256).dtype) == ("uint8", "int16")


def test_a_family_whose_routers_work_otherwise_is_refused() -> None:
    import transformers

    with pytest.raises(UnsupportedError, match=r"DeepseekV3 is none of the mixtures .* mixtral, .*, qwen3_moe"):
        check_replay(transformers.DeepseekV3Config())
