"""vLLM with weights and cache in 8 bits on a CUDA device, with CUDA graphs and sleep."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from hotseat.algorithms.digest import named_digests
from hotseat.errors import WeightError
from hotseat.train.eight_bits import round_cache, round_layers

from .conformance import reference_log_probs, request
from .test_transformers_engine import random_model
from .test_vllm_engine import SHAPE, Shared
from .test_vllm_fp8 import (  # noqa: F401  tests that run here once more
    Quantised,
    bare,
    live,
    model_of,
    test_a_layer_computes_what_rounded_weights_and_rounded_inputs_give,
    test_a_push_leaves_the_bits_that_loading_leaves_and_in_the_same_memory,
    test_digests_are_those_of_the_weights_that_arrived_while_the_engine_holds_what_it_made_of_them,
    test_log_probs_are_near_those_of_the_rounded_model_after_every_push,
    weights_of,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CACHED = Qwen2Config(**SHAPE | {"num_attention_heads": 2, "num_key_value_heads": 1}, tie_word_embeddings=True)
BOTH: Any = ["weights", "kv_cache"]


@pytest.fixture(scope="module")
def shared() -> Iterator[Quantised]:
    with tempfile.TemporaryDirectory() as directory:
        made = Quantised(Path(directory))
        yield made
        made.end()


@pytest.fixture(scope="module")
def cached() -> Iterator[Shared]:
    """An engine with keys and values in 8 bits, too."""
    with tempfile.TemporaryDirectory() as directory:
        made = Quantised(Path(directory), CACHED, fp8_cache=True)
        yield made
        made.end()


def test_8_bit_weights_leave_the_device_and_come_back(shared: Shared) -> None:
    engine = bare(shared)
    try:
        engine.load_weights(weights_of(1).items(), 1)
        before, expected = live(shared), engine.generate([request("a")])
        engine.offload(BOTH)
        engine.onload(BOTH)
        after = live(shared)
        assert [name for name in before if not torch.equal(before[name], after[name])] == []
        assert engine.digest() == named_digests(weights_of(1).items())
        assert engine.generate([request("a")])[0].token_ids == expected[0].token_ids
        engine.offload(BOTH, keep_weights=False)
        engine.onload(BOTH)
        with pytest.raises(WeightError, match="dropped"):
            engine.generate([request("a")])
        engine.load_weights(weights_of(1).items(), 2)
        after = live(shared)
        assert [name for name in before if not torch.equal(before[name], after[name])] == []
        assert engine.digest() == named_digests(weights_of(1).items())
        assert engine.generate([request("a")])[0].token_ids == expected[0].token_ids
    finally:
        engine.close()


def test_weights_in_8_bits_take_half_of_the_memory(shared: Shared) -> None:
    in_layers = [each for name, each in model_of(shared).named_parameters() if "proj.weight" in name]
    num_bytes = sum(each.numel() * each.element_size() for each in in_layers)
    num_values = sum(each.numel() for each in in_layers if each.element_size() == 1)
    assert num_values <= num_bytes < 1.05 * num_values


def test_an_8_bit_cache_gives_log_probs_near_those_of_rounded_keys_and_values(cached: Shared) -> None:
    generator = torch.Generator().manual_seed(0)
    sequences = torch.randint(0, 67, (4, 60), generator=generator).tolist()
    model = random_model(CACHED, 1)
    model.load_state_dict(weights_of(1, CACHED))
    round_layers(model)
    round_cache(model)
    with cached.engine() as engine:
        engine.load_weights(weights_of(1, CACHED).items(), 1)
        scores = torch.tensor(engine.score(sequences))[:, 1:]
        expected = torch.tensor([reference_log_probs(model, sequence, 1.0) for sequence in sequences])[:, 1:]
        gap = (scores - expected).abs()
        print(f"gap of scores: median {gap.median():.3f}, 90th percentile {gap.quantile(0.9):.3f}")
        assert gap.median() < 0.3
        completion = engine.generate([request("a", max_new_tokens=60)])[0]
        sequence = [*request("a").token_ids, *completion.token_ids]
        again = torch.tensor(engine.score([sequence])[0][len(request("a").token_ids) :])
        gap = (again - torch.tensor(completion.log_probs)).abs()
        print(f"gap of samples to scores: median {gap.median():.3f}, 90th percentile {gap.quantile(0.9):.3f}")
        assert gap.median() < 0.2
        engine.offload(BOTH)
        engine.onload(BOTH)
        assert torch.tensor(engine.score(sequences))[:, 1:].sub(scores).abs().median() < 0.05
