"""Latent attention in vLLM: what it decodes with is what was pushed, or a digest says that it is not."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DeepseekV3Config

from hotseat.algorithms.digest import combine_digests, tensor_digest
from hotseat.errors import WeightError
from hotseat.rollout.fused_weights import pieces
from hotseat.rollout.vllm_latent import DecodingWeights, latent_problem

from .conformance import named_weights
from .test_transformers_engine import random_model
from .test_vllm_engine import SHAPE, Shared

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

HEADS, LATENT = 4, 7
NAME = "attention.kv_b_proj.weight"


def attention(whole: torch.Tensor, rank: int = 0, size: int = 1, backend: str = "CPU_MLA") -> Any:
    from .vllm_layers import Column, Latent

    model = nn.Module()
    model.attention = nn.Module()
    model.attention.kv_b_proj = Column(whole.chunk(size)[rank].clone(), rank, size)
    model.attention.mla = Latent(model.attention.kv_b_proj, backend)
    return model


def decoding(model: nn.Module, rank: int = 0) -> tuple[DecodingWeights, Any]:
    [piece] = [piece for piece in pieces(model, rank) if piece.name == NAME]
    return DecodingWeights(model, [piece]), piece


def make_copies(layer: Any) -> None:
    """As where vLLM makes them in another dtype, or packed: views would change with the weight."""
    for form in ("W_UK_T", "W_UV"):
        copied = getattr(layer, form).clone()
        delattr(layer, form)
        setattr(layer, form, copied)


@pytest.mark.parametrize("size", [1, 2])
def test_what_it_decodes_with_has_the_digest_of_the_weight_that_it_was_made_of(size: int) -> None:
    whole, counted = torch.randn(HEADS * (3 + 2), LATENT), []
    for rank in range(size):
        made, piece = decoding(attention(whole, rank, size), rank)
        counted.append(tensor_digest(piece.live, piece.offset))
        made.check({NAME: counted[-1]})
    assert combine_digests(counted) == tensor_digest(whole)


@pytest.mark.parametrize("form", ["W_UK_T", "W_UV"])
def test_one_other_value_is_found(form: str) -> None:
    model = attention(torch.randn(HEADS * (3 + 2), LATENT))
    make_copies(model.attention.mla)
    made, piece = decoding(model)
    getattr(model.attention.mla, form)[1, 1, 1] += 1
    with pytest.raises(WeightError, match=f"{NAME}: what vLLM decodes with .* was not made from the values"):
        made.check({NAME: tensor_digest(piece.live)})


def test_a_push_makes_it_again_where_it_was_and_one_that_does_not_is_found() -> None:
    model = attention(torch.randn(HEADS * (3 + 2), LATENT))
    layer = model.attention.mla
    make_copies(layer)
    places = [layer.W_UK_T.data_ptr(), layer.W_UV.data_ptr()]
    made, piece = decoding(model)
    new = torch.randn(HEADS * (3 + 2), LATENT)
    piece.take(new)
    with pytest.raises(WeightError, match="was not made from the values of this weight"):
        made.check({NAME: tensor_digest(new)})
    made.make(torch.float32)
    made.check({NAME: tensor_digest(new)})
    assert [layer.W_UK_T.data_ptr(), layer.W_UV.data_ptr()] == places
    heads = new.view(HEADS, 3 + 2, LATENT)
    assert torch.equal(layer.W_UK_T, heads[:, :3])
    assert torch.equal(layer.W_UV, heads[:, 3:].transpose(1, 2))


def test_a_form_where_no_push_reaches_is_refused() -> None:
    model = attention(torch.randn(HEADS * (3 + 2), LATENT), backend="AMX_MLA")
    assert latent_problem(model) is None
    delattr(model.attention.mla, "W_UV")
    problem = latent_problem(model)
    assert problem is not None
    assert "its backend AMX_MLA keeps in another form, where no push reaches" in problem


@pytest.mark.long
def test_an_engine_whose_push_does_not_reach_what_it_decodes_with_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "q_lora_rank": 24}
    experts = {"first_k_dense_replace": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    config = DeepseekV3Config(**SHAPE | latent | experts | {"num_key_value_heads": 4})
    made = Shared(tmp_path, config)
    try:
        with made.engine() as engine:

            def push(version: int) -> dict[str, int]:
                model = random_model(config, version)
                engine.load_weights(named_weights(model), version)
                return {name: tensor_digest(tensor) for name, tensor in named_weights(model)}

            assert push(1) == engine.digest()
            [worker] = made.core.call("get_model")
            for module in worker.modules():
                if hasattr(module, "W_UK_T"):
                    make_copies(module)
            assert push(2) == engine.digest()
            monkeypatch.setattr(DecodingWeights, "make", lambda *_: None)
            push(3)
            with pytest.raises(WeightError, match=r"layers\.0\.self_attn\.kv_b_proj\.weight: what vLLM decodes with"):
                engine.digest()
    finally:
        made.end()
