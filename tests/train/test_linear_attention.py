"""Linear attention in packed segments: as of each sequence alone, through every layout, backend and kind of work."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import delta_nets
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from hotseat.algorithms.delta_rule import gates
from hotseat.errors import UnsupportedError
from hotseat.train.attention import Chunks
from hotseat.train.backend import LoraOptions, TrainOptions, ZeroOptions
from hotseat.train.fsdp import FSDPBackend
from hotseat.train.linear_attention import _over_segments, num_seen, use_own_linear_attention
from hotseat.train.packing import model_input, split_by_count
from hotseat.train.policy_models import prepare_model
from hotseat.train.zero import ZeroBackend
from hotseat.types import MicroBatch

from . import fsdp_factory, varlen_on_cpu, zero_factory
from .conformance import (
    OPTIONS,
    VOCAB_SIZE,
    ClippedLoss,
    assert_close,
    copy_weights,
    groups_of_four,
    plain_outputs,
    share_of,
    some_segments,
)
from .run_ranks import TIMEOUT_S, run_ranks
from .test_compile import train

assert varlen_on_cpu
LENGTHS = (131, 1, 64, 65, 3, 2, 200)


def segments(lengths: Sequence[int], context: int = 0) -> MicroBatch:
    """Random segments; those longer than it begin with the same `context` tokens, which were not sampled."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in lengths]
    for part in parts:
        if len(part) > context:
            part[:context] = parts[0][:context]
    masks = [torch.arange(len(part)) >= max(1, context if len(part) > context else 1) for part in parts]
    batch = MicroBatch.from_segments(parts, masks, [str(index) for index in range(len(parts))])
    return replace(batch, weights=torch.rand(batch.num_tokens, generator=generator))


def pieces(lengths: Sequence[int], values: Tensor) -> list[Tensor]:
    return list(values.split(list(lengths)))


@pytest.mark.parametrize("lengths", [LENGTHS, (5, 2, 7), (9, 0, 4), (64, 128)])
def test_convolution_and_rule_stay_inside_segments(lengths: tuple[int, ...]) -> None:
    """Against the definition token by token, in float64, with the gradients of inputs and weights."""
    layer = delta_nets.tiny().double().model.layers[0].linear_attn
    use_own_linear_attention([layer])
    generator = torch.Generator().manual_seed(1)
    num_tokens = sum(lengths)
    hidden = torch.randn(num_tokens, 32, generator=generator, dtype=torch.float64)
    inputs = [tensor.detach().requires_grad_() for tensor in (layer.in_proj_qkv(hidden), *gates(layer, hidden))]
    offsets = torch.tensor([0, *itertools.accumulate(lengths)])
    chunks = Chunks.of(torch.tensor(lengths), offsets, torch.arange(num_tokens), 3, None)
    found = _over_segments(layer, *inputs, chunks)

    alone = zip(*(pieces(lengths, tensor) for tensor in inputs), strict=True)
    expected = torch.cat([delta_nets.one_sequence(layer, *part) for part in alone if len(part[0])])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    upstream = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    learned = [*inputs, layer.conv1d.weight]
    ours, theirs = (torch.autograd.grad(each, learned, upstream) for each in (found, expected))
    for mine, exact in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-10, atol=1e-10)


def test_only_the_last_chunk_of_a_segment_is_padded() -> None:
    lengths = torch.tensor([131, 1, 64, 65])
    chunks = Chunks.of(lengths, torch.tensor([0, 131, 132, 196, 261]), torch.arange(261), 3, None)
    assert (chunks.length, chunks.counts) == (64, (4, 2, 1))
    assert chunks.rows.shape == (7, 67)
    # The first chunks, longest segments first, then the second ones; each with the three rows in front of it.
    assert chunks.rows[:, 3].tolist() == [0, 196, 131, 132, 64, 260, 128]
    assert chunks.rows[:, 2].tolist() == [261, 261, 261, 261, 63, 259, 127]  # 261: none
    short = Chunks.of(torch.tensor([5, 11]), torch.tensor([0, 5, 16]), torch.arange(16), 3, None)
    assert (short.length, short.counts) == (16, (2,))  # no longer than needed


def compared(model: Any, batch: MicroBatch, layout: Any, has_flash: bool) -> tuple[Any, Any]:
    """Log-probs and gradients of packed segments, and of each alone through the forward of transformers."""
    plain = plain_outputs(model, batch, 0.8).log_probs
    (plain * batch.weights).sum().backward()
    expected = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    packed, found_layout = prepare_model(copy.deepcopy(model), TrainOptions(layout=layout), torch.device("cpu"))
    assert found_layout == layout
    inputs = model_input(batch, layout, has_flash=has_flash, num_before=num_seen(model))
    log_probs = packed(inputs, 0.8)["log_probs"]
    (log_probs * batch.weights[inputs.tokens]).sum().backward()
    found = {name.removeprefix("model."): weight.grad for name, weight in packed.named_parameters()}
    return (log_probs, {name: found[name] for name in expected}), (plain[inputs.tokens], expected)


@pytest.mark.parametrize(
    ("layout", "has_flash", "make"),
    [
        ("packed", False, delta_nets.tiny),
        ("shared", False, delta_nets.tiny),
        ("packed", True, delta_nets.tiny),  # with fillers behind the segments
        ("shared", True, delta_nets.tiny),
        pytest.param("shared", False, delta_nets.tiny_mixture, marks=pytest.mark.slow),
    ],
)
def test_packed_segments_are_as_each_alone_in_transformers(layout: str, has_flash: bool, make: Any) -> None:
    """With segments of several chunks, and contexts that end inside a chunk."""
    ours, theirs = compared(make(), segments(LENGTHS, context=70 if layout == "shared" else 0), layout, has_flash)
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=1e-4)
    size = torch.stack([gradient.norm() for gradient in theirs[1].values()]).norm()
    for name, gradient in theirs[1].items():
        torch.testing.assert_close(ours[1][name], gradient, rtol=1e-3, atol=1e-5 * float(size), msg=name)


def test_recomputed_activations_and_contexts_that_are_shared_change_nothing() -> None:
    batch, found = groups_of_four(), []
    for options in (OPTIONS, replace(OPTIONS, layout="packed"), replace(OPTIONS, gradient_checkpointing=True)):
        backend = FSDPBackend(delta_nets.tiny(), options)
        assert not backend.is_padded
        backend.update([batch], ClippedLoss(), 0.8)
        found.append(copy_weights(backend))
        backend.close()
    assert_close(found[1], found[0], 1e-5)
    assert_close(found[2], found[0], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        (replace(OPTIONS, layout="packed"), ["linear_attention"]),
        *(
            pytest.param(options, ["linear_attention", "full_attention"], marks=pytest.mark.long)
            for options in (
                replace(OPTIONS, layout="packed"),
                replace(OPTIONS, layout="shared", gradient_checkpointing=True),
                replace(OPTIONS, layout="packed", lora=LoraOptions(3)),
            )
        ),
    ],
    ids=["linear", "packed", "recomputed", "adapters"],
)
def test_compiled_layers_train_alike_and_other_sizes_compile_nothing(options: TrainOptions, kinds: list[str]) -> None:
    torch._dynamo.reset()
    batches = [groups_of_four(num) for num in (8, 12, 4)]
    settings = {"layer_types": kinds, "num_hidden_layers": len(kinds)}
    expected, _ = train(delta_nets.tiny(**settings), options, batches, None)
    compiler = CompileCounterWithBackend("eager")
    found, counts = train(delta_nets.tiny(**settings), options, batches, compiler)
    torch._dynamo.reset()
    assert_close(found, expected, 1e-5)
    assert counts[1] == counts[2]


def _learns(layout: Any, **options: Any) -> Any:
    def scenario(make: Any, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
        backend = make(delta_nets.tiny(), replace(OPTIONS, layout=layout, **options))
        reports = []
        for step in range(3):
            work = split_by_count(some_segments(9, seed=step), 3)
            reports.append(backend.update(share_of(work, (2, 1), rank, num_ranks), ClippedLoss(), 1.0))
        result = {
            "weights": copy_weights(backend),
            "reports": torch.tensor([[report.loss, report.grad_norm] for report in reports], dtype=torch.float64),
        }
        backend.close()
        return result

    return scenario


SHARDED = {"packed": _learns("packed"), "adapters": _learns("packed", lora=LoraOptions(3))}


@pytest.mark.long
@pytest.mark.timeout(TIMEOUT_S + 100)
@pytest.mark.parametrize(("factory", "stage"), [(fsdp_factory, None), (zero_factory, 2), (zero_factory, 3)])
def test_two_ranks_train_as_one_with_padded_rows(
    factory: Any, stage: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(zero_factory.STAGE, str(stage))
    ranks = run_ranks(2, factory.__name__, tmp_path, suite=__name__, scenarios="SHARDED")
    for name, options in (("packed", {}), ("adapters", {"lora": LoraOptions(3)})):
        assert not isinstance(ranks[0][name], str), ranks[0][name]
        expected = _learns("padded", **options)(fsdp_factory.make, 0, 1, tmp_path)
        torch.testing.assert_close(ranks[0][name]["reports"], expected["reports"], rtol=1e-4, atol=0)
        assert_close(ranks[0][name]["weights"], expected["weights"], 1e-4)


def test_what_does_not_go_together_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotseat.train.policy_models.check_ranks", lambda *_: None)
    with pytest.raises(UnsupportedError, match="size is 2, and the model has layers with linear attention"):
        FSDPBackend(delta_nets.tiny(), replace(OPTIONS, sequence_parallel_size=2))
    monkeypatch.setattr("hotseat.train.zero.check_device", lambda *_: None)
    monkeypatch.setattr("hotseat.train.zero.build_operations", lambda: None)
    deep = replace(OPTIONS, layout="padded", zero=ZeroOptions(2, deepcompile=True))
    with pytest.raises(UnsupportedError, match="deepcompile is true, and Qwen3_5ForCausalLM has layers with linear"):
        ZeroBackend(delta_nets.tiny(), deep)
