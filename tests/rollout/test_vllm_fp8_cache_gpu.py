"""vLLM with weights and cache in FP8 on a CUDA device.

A file of its own, for a process of its own: in one process vLLM's memory that can sleep belongs to one engine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from hotseat.train.exact import round_cache, round_layers

from .conformance import reference_log_probs, request
from .test_transformers_engine import random_model
from .test_vllm_engine import SHAPE, Shared
from .test_vllm_fp8 import Quantised, weights_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CACHED = Qwen2Config(**SHAPE | {"num_attention_heads": 2, "num_key_value_heads": 1}, tie_word_embeddings=True)
BOTH: Any = ["weights", "kv_cache"]


@pytest.fixture(scope="module")
def cached() -> Iterator[Shared]:
    with tempfile.TemporaryDirectory() as directory:
        made = Quantised(Path(directory), CACHED, fp8_cache=True)
        yield made
        made.end()


def test_an_fp8_cache_gives_log_probs_near_those_of_rounded_keys_and_values(cached: Shared) -> None:
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
