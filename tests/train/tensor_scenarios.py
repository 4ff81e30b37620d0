"""Scenarios of ranks that share each layer. Two of them do what one rank alone does, four what two do."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hotseat.train.backend import TrainOptions, ZeroOptions
from hotseat.train.packing import split_by_count
from hotseat.train.zero import ZeroBackend

from . import zero_factory
from .conformance import (
    ONE_RANK,
    OPTIONS,
    SHARES,
    VOCAB_SIZE,
    ClippedLoss,
    Make,
    PlainTraining,
    Scenario,
    ValueLoss,
    _digests,
    _saves_and_loads,
    _scores,
    _skips_alike,
    _takes_weights,
    _trains,
    assert_close,
    assert_identical,
    copy_weights,
    learns,
    outcome,
    some_segments,
    tiny_model,
    tiny_value_model,
    wait_until_written,
)

NUM_SHARING = 2

# They need a folder for each rank, or go on with one rank after a failure that leaves the other one waiting: of several
# ranks none makes work again that did not fit its device.
_OF_ONE_ALONE = {
    "a_snapshot_that_cannot_be_written_says_why",
    "a_loss_that_fails_leaves_nothing_behind",
    "an_update_without_memory_is_made_again_in_smaller_pieces",
    "sixteen_bit_updates_without_memory_are_made_again",
    "scores_without_memory_are_made_again",
    "a_trial_changes_nothing",
}


def make(model: PreTrainedModel, options: TrainOptions) -> ZeroBackend:
    zero = options.zero or ZeroOptions(stage=int(os.environ[zero_factory.STAGE]))
    return ZeroBackend(model, replace(options, zero=replace(zero, tensor_parallel_size=NUM_SHARING)))


def _checks(check: Callable[[Make, Path], None]) -> Scenario:
    """Both ranks do what a rank alone would."""

    def scenario(make: Make, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
        check(make, directory / check.__name__)
        return {}

    return scenario


def _by_groups(scenario: Scenario) -> Scenario:
    """A group of ranks does what a rank would; alone, there are no groups."""

    def shared(make: Make, rank: int, num_ranks: int, directory: Path) -> Any:
        size = min(NUM_SHARING, num_ranks)
        return scenario(make, rank // size, num_ranks // size, directory)

    return shared


def _tiny(config: Any, kind: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    model: PreTrainedModel = kind(config(**shape, **heads))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:  # norms and biases, which begin as ones and zeros
                weight.add_(0.1 * torch.randn_like(weight))
    return model


def qwen2() -> PreTrainedModel:
    """Biases that are cut, and that are not."""
    return _tiny(Qwen2Config, Qwen2ForCausalLM)


def qwen3() -> PreTrainedModel:
    """Norms of queries and keys: whole, and used for a part of the heads."""
    return _tiny(Qwen3Config, Qwen3ForCausalLM)


def _trains_as(model: Callable[[], PreTrainedModel], options: TrainOptions, loss: Any = None) -> Scenario:
    """Three updates, counted once for each group; then scores."""

    def scenario(make: Make, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
        backend = make(model(), options)
        facts = []
        for step in range(3):
            report = backend.update(split_by_count(some_segments(9, seed=step), 3), loss or ClippedLoss(0.01), 0.9)
            facts.append((report.loss, report.grad_norm, report.num_tokens, report.metrics["clipped"]))
        scores = backend.values if options.head == "value" else lambda batches: backend.log_probs(batches, 0.9)
        assert len(backend.gather_facts(rank, "count")) == 1
        assert backend.gather_facts(rank, "count", of_every_rank=True) == list(range(num_ranks))
        return outcome(backend, facts, scores([some_segments()]))

    return scenario


def _goes_on(make: Make, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
    """From what one rank of the other backend saved; and saves for it in turn, with the average."""
    options = replace(OPTIONS, average_decay=0.5)
    backend = make(qwen2(), options)
    if num_ranks == 1:
        backend.update([some_segments(seed=0)], ClippedLoss(), 1.0)
        backend.save(directory / "alone")
    backend.load(directory / "alone")
    assert backend.version == 1
    loaded = copy_weights(backend)
    backend.update([some_segments(seed=1)], ClippedLoss(), 1.0)
    backend.save(directory / f"saved-{num_ranks}")
    backend.snapshot(directory / f"snapshot-{num_ranks}")
    wait_until_written(backend)
    with backend.averaged():
        average = copy_weights(backend)
    weights = copy_weights(backend)
    backend.close()
    found = {f"loaded {name}": weight for name, weight in loaded.items()} | weights
    return {"weights": found | {f"average {name}": weight for name, weight in average.items()}}


def each_rank_has_a_part(make: Make, directory: Path) -> None:
    backend = make(qwen2(), OPTIONS)
    assert isinstance(backend, ZeroBackend)
    shapes = {name: tuple(weight.shape) for name, weight in backend._weights.items()}
    mine = {name.removeprefix("model.layers.1."): shape for name, shape in shapes.items() if ".layers.1." in name}
    assert mine == {
        "self_attn.q_proj.weight": (16, 32),
        "self_attn.q_proj.bias": (16,),
        "self_attn.k_proj.weight": (8, 32),
        "self_attn.k_proj.bias": (8,),
        "self_attn.v_proj.weight": (8, 32),
        "self_attn.v_proj.bias": (8,),
        "self_attn.o_proj.weight": (32, 16),
        "mlp.gate_proj.weight": (24, 32),
        "mlp.up_proj.weight": (24, 32),
        "mlp.down_proj.weight": (32, 24),
        "input_layernorm.weight": (32,),
        "post_attention_layernorm.weight": (32,),
    }
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (VOCAB_SIZE, 32)
    # The optimizer, too: two moments and a weight of each element here, on one of `num_ranks // NUM_SHARING` ranks.
    assert backend.saved_bytes() < sum(3.1 * 4 * math.prod(shape) for shape in shapes.values())
    backend.close()


def sixteen_bit_compute_keeps_masters(make: Make, directory: Path) -> None:
    batch = some_segments(4)
    backend = make(qwen3(), replace(OPTIONS, precision="bf16_master"))
    reference = PlainTraining(qwen3(), OPTIONS)
    # Not rounded when they were loaded.
    assert_identical(copy_weights(backend), {name: weight.detach() for name, weight in reference.weights.items()})
    for _ in range(2):
        report = backend.update([batch], ClippedLoss(), 1.0)
        _, norm = reference.update(batch, ClippedLoss(), 1.0)
        assert report.grad_norm == pytest.approx(norm, rel=0.05)
    weights = copy_weights(backend)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert_close(weights, {name: weight.detach() for name, weight in reference.weights.items()}, 1e-3)
    halves = copy_weights(backend, dtype=torch.bfloat16)
    assert_identical(halves, {name: weight.bfloat16() for name, weight in weights.items()})
    backend.offload(["optimizer"])
    assert_identical(copy_weights(backend, dtype=torch.bfloat16), halves)
    backend.onload(["optimizer"])
    backend.save(directory / "state")
    backend.update([batch], ClippedLoss(), 1.0)
    backend.load(directory / "state")
    assert_identical(copy_weights(backend), weights)
    backend.close()


def _computes_in(precision: Any) -> Callable[[Make, Path], None]:
    def check(make: Make, directory: Path) -> None:
        batch = some_segments(4)
        backend = make(tiny_model(), replace(OPTIONS, precision=precision))
        reference = PlainTraining(tiny_model(), OPTIONS)
        reports = [backend.update([batch], ClippedLoss(), 1.0)]
        while reports[-1].is_skipped:  # until the loss is scaled well
            reports.append(backend.update([batch], ClippedLoss(), 1.0))
            assert len(reports) < 20
        _, norm = reference.update(batch, ClippedLoss(), 1.0)
        assert reports[-1].grad_norm == pytest.approx(norm, rel=0.05)
        expected = {name: weight.detach() for name, weight in reference.weights.items()}
        assert_close(copy_weights(backend), expected, 1e-3 if precision == "fp16" else 1e-2)
        backend.close()

    check.__name__ = f"computes_in_{precision}"
    return check


CHECKS: dict[str, Scenario] = {
    check.__name__: _checks(check)
    for check in (
        *ONE_RANK,
        each_rank_has_a_part,
        sixteen_bit_compute_keeps_masters,
        _computes_in("bf16"),
        _computes_in("fp16"),
    )
    if check.__name__ not in _OF_ONE_ALONE
}
LEARNS: dict[str, Scenario] = {
    "learns": _by_groups(learns(OPTIONS)),
    "goes_on": _goes_on,
    "qwen2": _trains_as(qwen2, replace(OPTIONS, gradient_checkpointing=True)),
    "qwen3": _trains_as(qwen3, OPTIONS),
    "padded": _trains_as(tiny_model, replace(OPTIONS, layout="padded")),
    "value_model": _trains_as(tiny_value_model, replace(OPTIONS, head="value"), ValueLoss()),
    "takes_weights": _by_groups(_takes_weights),
    "skips_alike": _by_groups(_skips_alike),
    "digests": _by_groups(_digests),
    **{
        name: _trains_as(tiny_model, replace(OPTIONS, zero=ZeroOptions(2, **{name: value})))
        for name, value in {"adam_offload": True, "overlap_comm": True, "grad_accum_dtype": "fp32"}.items()
    },
}
TWO: dict[str, Scenario] = CHECKS | LEARNS
# Those that other tests build on, or that would fail first if layers were cut or put together wrongly.
FEW: dict[str, Scenario] = {
    name: TWO[name]
    for name in (
        "each_rank_has_a_part",
        "sixteen_bit_compute_keeps_masters",
        "learns",
        "goes_on",
        "qwen2",
        "skips_alike",
    )
}

FOUR: dict[str, Scenario] = {
    **{f"trains_{name}": _by_groups(_trains(shares)) for name, shares in SHARES.items()},
    "learns": _by_groups(learns(OPTIONS)),
    "scores": _by_groups(_scores),
    "skips_alike": _by_groups(_skips_alike),
    "digests": _by_groups(_digests),
    "saves_and_loads": _by_groups(_saves_and_loads),
}
