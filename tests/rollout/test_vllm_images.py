"""vLLM with prepared images: the tokens and log-probs of the trainer, and caches that no image or version shares."""

from __future__ import annotations

import importlib.util
import os
import string
import sys
from types import SimpleNamespace

import image_cases as tiny
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from hotseat.data.images import ImageLimits, ImageStore, load_processor, prepare_rows
from hotseat.data.prompts import make_prompts
from hotseat.data.rows import Row
from hotseat.errors import UserError
from hotseat.model_source import ModelSource
from hotseat.rollout import TransformersEngine
from hotseat.rollout.kinds import EngineOptions, EngineSettings, ImageOptions
from hotseat.rollout.vllm_engine import VllmEngine, log_to, weight_names
from hotseat.rollout.vllm_versions import Core
from hotseat.types import Request, Sampling
from hotseat.vision import placeholder_ids, policy_class, tokens_of

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

WIDTH = 64  # vLLM's attention on a CPU has no smaller heads
TOLERANCE = 2e-5  # of log-probs in fp32
TEXT = (string.ascii_lowercase * 6)[:140]  # longer than a block of vLLM's cache on a CPU, of 128 tokens
FAMILIES = [
    *(
        pytest.param(family, marks=pytest.mark.slow if family == "qwen2_5_vl" else pytest.mark.long)
        for family in tiny.FAMILIES
    ),
    pytest.param(
        "smolvlm",
        marks=[
            pytest.mark.long,
            pytest.mark.skipif(importlib.util.find_spec("num2words") is None, reason="num2words is not installed"),
        ],
    ),
]


def load(name):
    return policy_class(AutoConfig.from_pretrained(name)).from_pretrained(name).eval()


@pytest.fixture(scope="module", params=FAMILIES)
def seeing(request, tmp_path_factory):
    """A tiny model of a family in vLLM and in transformers, and prompts: two that differ in pixels, one without."""
    family = request.param
    folder = tmp_path_factory.mktemp(family)
    name = tiny.save(family, folder / "model", hidden_size=WIDTH)
    tokenizer = AutoTokenizer.from_pretrained(name)
    store = ImageStore(folder / "images", load_processor(ModelSource(name), tokenizer), ImageLimits(2, 10**6, 10**6))
    place = tiny.PLACE[family]
    rows = [
        Row({"input": text, "images": images}, "x", at, has_line=True)
        for at, (text, images) in enumerate(
            [
                (f"{place}{TEXT}", [tiny.drawn(0)]),
                (f"{place}{TEXT}", [tiny.drawn(1)]),
                (f"a{place}cc{place}: count b?", [tiny.drawn(1), tiny.drawn(2, 84, 28)]),
                ("only text", []),
            ]
        )
    ]
    prompts, _ = make_prompts(
        prepare_rows(rows, store, "images", "input", is_chat=False), tokenizer, image_key="images"
    )
    assert prompts[0].token_ids == prompts[1].token_ids
    store.write_largest(folder / "largest.safetensors", 256)
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
                prefix_caching=True, cache_gib=1 / 16, images=ImageOptions(2, str(folder / "largest.safetensors"))
            ),
        )
    )
    end, core.close = core.close, lambda: core.abort(list(core._core.scheduler.requests))
    judge = TransformersEngine(load(name), max_length=256, num_slots=4)

    def engine(keeps_cache=False):
        """Return vLLM and transformers, both with the weights of the model's files."""
        made = VllmEngine(
            core, weight_names(ModelSource(name)), max_length=256, num_slots=16, num_threads=1, keeps_cache=keeps_cache
        )
        for each in (made, judge):
            each.load_weights(list(load(name).state_dict().items()), 0)
        return made

    yield SimpleNamespace(family=family, name=name, folder=folder, prompts=prompts, engine=engine, judge=judge)
    judge.close()
    end()


def changed(name):
    """Return other weights, of the visual encoder too."""
    torch.manual_seed(9)
    return [(key, weight + 0.05 * torch.randn_like(weight)) for key, weight in load(name).state_dict().items()]


def check_completions(seeing, engine, requests):
    """Generate, and compare the log-probs of what was sampled with those of transformers."""
    made = engine.generate(requests)
    whole = [(*request.token_ids, *each.token_ids) for request, each in zip(requests, made, strict=True)]
    scores = seeing.judge.score(whole, 1.0, [request.images for request in requests])
    for request, each, score in zip(requests, made, scores, strict=True):
        assert each.log_probs == pytest.approx(score[len(request.token_ids) :], abs=TOLERANCE)
    return made


def requests_of(prompts, count=3):
    return [
        Request(f"{at}/{seed}", prompt.token_ids, Sampling(8), 7 * seed + at, prompt.images)
        for at, prompt in enumerate(prompts)
        for seed in range(count)
    ]


def test_vllm_samples_and_scores_the_tokens_of_the_trainer_as_transformers_does(seeing):
    engine = seeing.engine()
    placeholders = set(placeholder_ids(AutoConfig.from_pretrained(seeing.name)))
    try:
        sequences = [[*prompt.token_ids, 5, 6, 7] for prompt in seeing.prompts]
        sequences[2][-1] = min(placeholders)  # one that a policy sampled
        images = [prompt.images for prompt in seeing.prompts]
        for temperature in (1.0, 0.7):
            right = seeing.judge.score(sequences, temperature, images)
            for score, expected in zip(engine.score(sequences, temperature, images), right, strict=True):
                assert score == pytest.approx(expected, abs=TOLERANCE)
        # One after the other: the second prompt finds a prefix of the same tokens in the cache, of another image.
        one, two, *others = seeing.prompts
        greedy = [
            engine.generate([Request("g", prompt.token_ids, Sampling(1, temperature=0.0), 0, prompt.images)])[0]
            for prompt in (one, two, one)
        ]
        assert abs(greedy[0].log_probs[0] - greedy[1].log_probs[0]) > 1e-4
        assert greedy[0].log_probs == pytest.approx(greedy[2].log_probs, abs=TOLERANCE)
        for made in check_completions(seeing, engine, requests_of([one, two, *others])):
            assert not set(made.token_ids[:-1]) & placeholders
    finally:
        engine.close()


@pytest.mark.parametrize("keeps_cache", [False, True])
def test_what_vllm_computed_of_an_image_is_not_used_by_a_later_version(seeing, keeps_cache):
    engine = seeing.engine(keeps_cache)
    try:
        check_completions(seeing, engine, requests_of(seeing.prompts[:2]))
        for each in (engine, seeing.judge):
            each.load_weights(changed(seeing.name), 1)
        check_completions(seeing, engine, requests_of(seeing.prompts[:2]))
        sequences = [[*prompt.token_ids, 5, 6] for prompt in seeing.prompts]
        images = [prompt.images for prompt in seeing.prompts]
        right = seeing.judge.score(sequences, 1.0, images)
        for score, expected in zip(engine.score(sequences, 1.0, images), right, strict=True):
            assert score == pytest.approx(expected, abs=TOLERANCE)
        live, expected = engine.digest(), seeing.judge.digest()
        assert {name: expected[name] for name in live} == live
        # LLaVA takes the last layer but one of its encoder, and vLLM leaves out what comes after.
        unused = ("vision_tower.encoder.layers.1.", "vision_tower.post_layernorm.")
        assert all(any(part in name for part in unused) for name in engine.undigested)
        assert bool(engine.undigested) == (seeing.family == "llava")
        assert any("vis" in name for name in live)
    finally:
        engine.close()


def test_requests_that_do_not_fit_their_images_are_refused(seeing):
    engine = seeing.engine()
    one, _, two, text = seeing.prompts
    try:
        for token_ids, images, problem in (
            (two.token_ids, (*two.images, one.images[0]), r"3 images .* data.max_images_per_prompt allows \(2\)"),
            (text.token_ids, one.images, "do not have the placeholders of its images"),
            (one.token_ids[:3], one.images, "do not have the placeholders of its images"),
        ):
            with pytest.raises(UserError, match=problem):
                engine.submit(Request("a", token_ids, Sampling(1), 0, images))
        with pytest.raises(UserError, match="do not have the placeholders of its images"):
            engine.score([text.token_ids], 1.0, [one.images])
        largest = max(len(tokens_of(image)) for image in two.images)
        if seeing.family == "qwen2_5_vl":
            huge = tiny.write_pixels(seeing.folder, 5, rows=4, columns=4 * (largest + 1))
            with pytest.raises(UserError, match=f"and vLLM was started for images of {largest}"):
                engine.submit(Request("a", tokens_of(huge), Sampling(1), 0, (huge,)))
    finally:
        engine.close()


def test_torchvision_is_not_left_behind(seeing):
    if importlib.util.find_spec("torchvision") is None:
        assert not any(name.partition(".")[0] == "torchvision" for name in sys.modules)
        assert "transformers.models.qwen2_vl.image_processing_qwen2_vl" not in sys.modules
