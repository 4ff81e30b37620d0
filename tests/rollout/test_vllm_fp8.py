"""vLLM with weights in FP8, on its CPU build: an engine that got weights by a push equals one that loaded them."""

from __future__ import annotations

import importlib.util
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen2Config

from hotseat.algorithms.digest import named_digests, tensor_digest
from hotseat.errors import WeightError
from hotseat.model_source import ModelSource
from hotseat.rollout.vllm_engine import VllmEngine, weight_names
from hotseat.rollout.vllm_fp8 import QuantisedDigests, fp8_problem
from hotseat.rollout.vllm_versions import installed_version
from hotseat.train.exact import round_layers, rounded_rows

from .conformance import PATIENCE_S, reference_log_probs
from .test_transformers_engine import random_model
from .test_vllm_engine import SHAPE, Shared

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

MODEL = Qwen2Config(**SHAPE, tie_word_embeddings=True)  # its queries, keys and values have biases


def weights_of(number: int, config: Qwen2Config = MODEL) -> dict[str, torch.Tensor]:
    return {name: tensor.bfloat16() for name, tensor in random_model(config, number).state_dict().items()}


def references(number: int, sequences: list[list[int]]) -> list[list[float]]:
    """Log-probs of a float32 forward in which layers are rounded to FP8."""
    model = random_model(MODEL, number)
    model.load_state_dict(weights_of(number))
    round_layers(model)
    return [reference_log_probs(model, sequence, 1.0) for sequence in sequences]


def model_of(shared: Shared) -> Any:
    executor: Any = shared.core._core.model_executor
    return executor.driver_worker.worker.model_runner.model


def live(shared: Shared) -> dict[str, torch.Tensor]:
    """The parameters of vLLM's model as they are now, as bytes."""
    parameters = model_of(shared).named_parameters()
    return {name: each.detach().contiguous().view(torch.uint8).cpu().clone() for name, each in parameters}


class Quantised(Shared):
    """A core with weights in FP8, and the parameters that loading has left."""

    def __init__(self, directory: Path, config: Qwen2Config = MODEL, **options: Any):
        super().__init__(directory, config, dtype="bfloat16", fp8_weights=True, **options)
        self.loaded = live(self)


class Fp8PtpcOnlineLinearMethod:
    """By the name of vLLM's."""


class Other:
    """Another way to have weights in FP8."""


def layer(method: type, rows: int, columns: int) -> nn.Module:
    """A layer as vLLM keeps it, of 32 x 48 but for padding."""
    made = nn.Module()
    made.weight = nn.Parameter(torch.zeros(rows, columns).to(torch.float8_e4m3fn).t(), requires_grad=False)
    made.weight_scale = nn.Parameter(torch.ones(rows, 1), requires_grad=False)
    made.quant_method, made.prefix = method(), "layers.0.down_proj"
    made.output_size_per_partition, made.input_size_per_partition = 32, 48
    return made


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([nn.Linear(2, 3)], "in none of the forms that are known in FP8: unset rollout.quantization"),
        (
            [layer(Fp8PtpcOnlineLinearMethod, 32, 48), layer(Other, 32, 48)],
            "in FP8 by Other (1), where none can be pushed: unset rollout.quantization",
        ),
        (
            [layer(Fp8PtpcOnlineLinearMethod, 32, 64)],
            "padded (layers.0.down_proj, 32 x 48), and only multiples of 16 fit: unset rollout.quantization",
        ),
        ([layer(Fp8PtpcOnlineLinearMethod, 32, 48), nn.Linear(2, 3)], None),
    ],
)
def test_layers_that_a_push_cannot_reach_in_fp8_are_refused(layers: list[nn.Module], message: str | None) -> None:
    model = nn.Sequential(*layers)
    problem = fp8_problem(model, SimpleNamespace(quantization="fp8_per_channel"))
    expected = f"vLLM {installed_version()} keeps the weights of this Sequential {message}"
    assert problem == (None if message is None else expected)
    assert fp8_problem(model, SimpleNamespace(quantization=None)) is None


class CopiedPiece:
    """A piece of which each window is a copy, as on a device. `copies` has those of all pieces."""

    def __init__(self, name: str, copies: list[weakref.ref[torch.Tensor]]):
        self.name, self.offset, self.copies = name, (0, 0), copies
        self.live, self.scales = torch.zeros(3, 4).to(torch.float8_e4m3fn), torch.ones(3, 1)
        self.layer = SimpleNamespace(orig_dtype=torch.bfloat16)
        self.most = 0  # copies at a time

    def window(self, whole: torch.Tensor) -> Any:
        def to(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
            copied = whole.to(device, dtype, copy=True)
            self.copies.append(weakref.ref(copied))
            self.most = sum(each() is not None for each in self.copies)
            return copied

        return SimpleNamespace(to=to)


def test_digests_of_what_arrived_take_no_copy_of_a_whole_bucket() -> None:
    copies: list[weakref.ref[torch.Tensor]] = []
    pieces: list[Any] = [CopiedPiece(str(number), copies) for number in range(6)]
    weights = [torch.full((3, 4), number + 1.0) for number in range(6)]
    digests = QuantisedDigests()
    digests.record(list(zip(pieces, weights, strict=True)))
    assert digests.of(pieces) == [tensor_digest(weight.bfloat16()) for weight in weights]
    assert len(copies) == 6
    assert max(piece.most for piece in pieces) <= 2  # the one before is released when the next is there


@pytest.fixture(scope="module")
def shared() -> Iterator[Quantised]:
    with tempfile.TemporaryDirectory() as directory:
        made = Quantised(Path(directory))
        yield made
        made.end()


def bare(shared: Shared) -> VllmEngine:
    """An engine around the core as it is, without a push."""
    names = weight_names(ModelSource(shared.directory))
    return VllmEngine(shared.core, names, max_length=128, num_slots=8, num_threads=1, call_timeout_s=PATIENCE_S)


def test_a_push_leaves_the_bits_that_loading_leaves_and_in_the_same_memory(shared: Quantised) -> None:
    loaded = shared.loaded
    assert sum(name.endswith("weight_scale") for name in loaded) == 8
    places = {name: each.data_ptr() for name, each in model_of(shared).named_parameters()}
    engine = bare(shared)
    try:
        with pytest.raises(WeightError, match=r"is in FP8 and was not pushed yet: it has no digest"):
            engine.digest()
        engine.load_weights(weights_of(1).items(), 1)
        other = live(shared)
        assert all(not torch.equal(other[name], loaded[name]) for name in loaded if "_proj." in name)
        engine.load_weights(weights_of(0).items(), 2)
        again = live(shared)
        assert [name for name in loaded if not torch.equal(again[name], loaded[name])] == []
        assert {name: each.data_ptr() for name, each in model_of(shared).named_parameters()} == places
    finally:
        engine.close()


def test_digests_are_those_of_the_weights_that_arrived_while_the_engine_holds_what_it_made_of_them(shared: Shared):
    layer = model_of(shared).model.layers[1]
    engine = bare(shared)
    try:
        for number in (0, 1):
            engine.load_weights(weights_of(number).items(), number)
            assert engine.digest() == named_digests(weights_of(number).items())
        kept = layer.self_attn.qkv_proj.weight_scale[200].clone()
        layer.self_attn.qkv_proj.weight_scale.data[200] *= 1.01  # a row of values
        with pytest.raises(WeightError, match=r"layers\.1\.self_attn\.v_proj\.weight: the engine's FP8 values are not"):
            engine.digest()
        layer.self_attn.qkv_proj.weight_scale.data[200] = kept
        assert engine.digest() == named_digests(weights_of(1).items())
        layer.mlp.down_proj.weight.data.view(torch.int8)[3, 5] ^= 1
        with pytest.raises(WeightError, match=r"layers\.1\.mlp\.down_proj\.weight: the engine's FP8 values are not"):
            engine.digest()
    finally:
        engine.close()


def test_a_layer_computes_what_rounded_weights_and_rounded_inputs_give(shared: Shared) -> None:
    layer = model_of(shared).model.layers[0].mlp.gate_up_proj
    inputs = torch.randn(7, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights = weights_of(0)
    whole = torch.cat([weights[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")])
    with shared.engine() as engine:
        engine.load_weights(weights.items(), 1)
        with torch.inference_mode():
            computed = layer.quant_method.apply(layer, inputs.to(layer.weight.device)).cpu()
    expected = rounded_rows(inputs.float()) @ rounded_rows(whole.float()).t()
    assert computed.float() == pytest.approx(expected, rel=1e-2, abs=1e-2)
    assert not torch.allclose(computed.float(), inputs.float() @ whole.float().t(), rtol=1e-2, atol=1e-2)


def test_log_probs_are_near_those_of_the_rounded_model_after_every_push(shared: Shared) -> None:
    generator = torch.Generator().manual_seed(0)
    sequences = torch.randint(0, 67, (4, 60), generator=generator).tolist()
    with shared.engine() as engine:
        for number in (1, 0):
            engine.load_weights(weights_of(number).items(), 1 + number)
            scores = torch.tensor(engine.score(sequences))[:, 1:]
            mine, other = (torch.tensor(references(each, sequences))[:, 1:] for each in (number, 1 - number))
            near, far = ((scores - each).abs().median() for each in (mine, other))
            assert near < 0.2
            assert far > 5 * near  # how far random models are from each other depends on the processor


@pytest.mark.long
def test_two_ranks_quantise_a_push_as_they_quantise_what_they_load() -> None:
    sequences = [[5, 6, 7, 8, 9, 11, 3, 60, 2]]
    with tempfile.TemporaryDirectory() as directory:
        made = Shared(Path(directory), MODEL, dtype="bfloat16", fp8_weights=True, tensor_parallel_size=2)
        engine = bare(made)
        try:
            loaded = engine.score(sequences)
            for number in (1, 0):
                engine.load_weights(list(weights_of(number).items()), 2 - number)
                assert engine.digest() == named_digests(weights_of(number).items())
                assert (engine.score(sequences) == loaded) == (number == 0)
        finally:
            engine.close()
            made.end()
