"""vLLM with images, and adapters of the language model that are pushed apart from the weights below them."""

from __future__ import annotations

import importlib.util
import os

import image_cases as tiny
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from hotseat.algorithms.adapters import factor_names
from hotseat.algorithms.digest import named_digests
from hotseat.data.images import ImageLimits, ImageStore, load_processor, prepare_rows
from hotseat.data.prompts import make_prompts
from hotseat.data.rows import Row
from hotseat.errors import RunError
from hotseat.model_source import ModelSource
from hotseat.rollout import TransformersEngine
from hotseat.rollout.kinds import EngineOptions, EngineSettings, ImageOptions
from hotseat.rollout.vllm_engine import (
    AdapterOptions,
    Core,
    VllmEngine,
    log_to,
    weight_names,
)
from hotseat.train.lora import target_layers
from hotseat.types import Request, Sampling
from hotseat.vision import policy_class

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

RANK = 2
TOLERANCE = 2e-5  # of log-probs in fp32


def load(name):
    return policy_class(AutoConfig.from_pretrained(name)).from_pretrained(name).eval()


def start(family, folder):
    """Start vLLM with room for adapters of the language model; return it, the model's name, adapters and prompts."""
    name = tiny.save(family, folder / "model", hidden_size=64)  # vLLM's attention on a CPU has no smaller heads
    tokenizer = AutoTokenizer.from_pretrained(name)
    store = ImageStore(folder / "images", load_processor(ModelSource(name), tokenizer), ImageLimits(1, 10**6, 10**6))
    rows = [
        Row({"input": f"{tiny.PLACE[family]} count {at}", "images": [tiny.drawn(at)]}, "x", at, has_line=True)
        for at in range(3)
    ]
    prompts, _ = make_prompts(
        prepare_rows(rows, store, "images", "input", is_chat=False), tokenizer, image_key="images"
    )
    store.write_largest(folder / "largest.safetensors", 256)
    part = "text_model" if family == "idefics3" else "language_model"
    adapters = AdapterOptions(RANK, tuple(target_layers(ModelSource(name), f".*{part}.*_proj")))
    os.environ.update(log_to(folder / "vllm.log"))
    core = Core(
        EngineSettings(
            model=ModelSource(name),
            max_length=256,
            num_slots=16,
            eos_token_ids=(),
            dtype="float32",
            num_threads=1,
            engine="vllm",
            options=EngineOptions(
                prefix_caching=True,
                adapter_rank=RANK,
                cache_gib=1 / 16,
                images=ImageOptions(1, str(folder / "largest.safetensors")),
            ),
        ),
        adapters,
    )
    return core, name, adapters, prompts


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "idefics3"])
def test_adapters_that_are_pushed_alone_give_what_merged_ones_give(family, tmp_path):
    core, name, adapters, prompts = start(family, tmp_path)
    names = weight_names(ModelSource(name), adapters)
    engine = VllmEngine(core, names, max_length=256, num_slots=16, num_threads=1)
    judge = TransformersEngine(load(name), max_length=256, num_slots=4)
    base = dict(load(name).named_parameters())
    try:
        assert engine.undigested == frozenset()
        for version in (1, 2):
            generator = torch.Generator().manual_seed(version)
            factors = {key: 0.2 * torch.randn(shape, generator=generator) for key, shape in names.factors.items()}
            weights = [(key, weight.detach()) for key, weight in base.items()]
            engine.load_weights([*factors.items(), *(weights if version == 1 else [])], version)
            assert engine.digest(factors) == named_digests(factors.items())
            merged = dict(weights)
            for layer in adapters.layers:
                a, b = factor_names(f"{layer}.weight")
                merged[f"{layer}.weight"] = merged[f"{layer}.weight"] + factors[b] @ factors[a]
            judge.load_weights(list(merged.items()), version)
            requests = [
                Request(f"{at}/{seed}", prompt.token_ids, Sampling(8), 7 * seed + at, prompt.images)
                for at, prompt in enumerate(prompts)
                for seed in range(3)
            ]
            made = engine.generate(requests)
            whole = [(*request.token_ids, *each.token_ids) for request, each in zip(requests, made, strict=True)]
            scores = judge.score(whole, 1.0, [request.images for request in requests])
            for request, each, score in zip(requests, made, scores, strict=True):
                assert each.log_probs == pytest.approx(score[len(request.token_ids) :], abs=TOLERANCE)
    finally:
        engine.close()
        judge.close()


def test_llava_is_refused_because_vllm_leaves_out_layers_of_its_encoder(tmp_path):
    core, name, adapters, _ = start("llava", tmp_path)
    try:
        with pytest.raises(RunError, match=r"no known place for model.vision_tower.* set rollout.lora_sync to merged"):
            VllmEngine(core, weight_names(ModelSource(name), adapters), max_length=256, num_slots=16, num_threads=1)
    finally:
        core.close()
