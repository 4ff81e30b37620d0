"""Latent attention in vLLM on a CUDA device, with CUDA graphs and sleep, in 16 bits."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, PreTrainedModel

from hotseat.algorithms.digest import named_digests
from hotseat.errors import WeightError
from hotseat.rollout.vllm_latent import DecodingWeights

from .conformance import named_weights, reference_log_probs, request
from .test_transformers_engine import random_model
from .test_vllm_engine import SHAPE, Shared
from .test_vllm_latent import make_copies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": 64}
EXPERTS = {"first_k_dense_replace": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}  # layers without any
CONFIG = DeepseekV3Config(**SHAPE | LATENT | EXPERTS | {"num_key_value_heads": 4})


def model(number: int) -> PreTrainedModel:
    return random_model(CONFIG, number).bfloat16()


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    with tempfile.TemporaryDirectory() as directory:
        made = Shared(Path(directory), CONFIG, dtype="bfloat16")
        yield made
        made.end()


def check(engine: Any, number: int) -> None:
    """Prompts and sampled tokens have the log-probs of the model, but for rounding, and weights have its digests."""
    assert engine.digest() == named_digests(named_weights(model(number)))
    completion = engine.generate([request("a", max_new_tokens=24)])[0]
    tokens = [*request("a").token_ids, *completion.token_ids]
    truth = torch.tensor(reference_log_probs(model(number).float(), tokens, 1.0))
    start = len(request("a").token_ids)
    for found, expected in (
        (completion.log_probs, truth[start:]),  # decoded
        (engine.score([tokens])[0], truth),  # prefilled
    ):
        gap = (torch.tensor(found) - expected).abs()
        assert gap.median() < 0.05
        assert gap.max() < 0.5


def test_a_push_reaches_what_decodes_in_captured_graphs(shared: Shared) -> None:
    with shared.engine() as engine:
        for number in (1, 2):
            engine.load_weights(named_weights(model(number)), number)
            check(engine, number)


def test_weights_that_were_dropped_come_again(shared: Shared) -> None:
    with shared.engine() as engine:
        engine.offload(["weights", "kv_cache"], keep_weights=False)
        engine.onload(["weights", "kv_cache"])
        engine.load_weights(named_weights(model(1)), 1)
        check(engine, 1)


def test_a_push_that_does_not_reach_it_is_found(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Last in this file: the captured graphs of the shared core read the memory of what is replaced here."""
    with shared.engine() as engine:
        [held] = shared.core.call("get_model")
        for module in held.modules():
            if hasattr(module, "W_UK_T"):
                make_copies(module)
        monkeypatch.setattr(DecodingWeights, "make", lambda *_: None)
        engine.load_weights(named_weights(model(1)), 1)
        with pytest.raises(WeightError, match=r"layers\.0\.self_attn\.kv_b_proj\.weight: what vLLM decodes with"):
            engine.digest()
