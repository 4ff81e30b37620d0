"""Models that see images on a CUDA device: packed by varlen attention, compiled, offloaded, sampled."""

from dataclasses import replace

import image_cases
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from hotseat.data.frames import FramePreparer
from hotseat.data.images import load_processor
from hotseat.model_source import ModelSource
from hotseat.rollout import SlotOptions, TransformersEngine
from hotseat.train.attention import IMAGE_ATTENTION
from hotseat.train.backend import PARTS, AdamW, Schedule, TrainOptions
from hotseat.train.fsdp import FSDPBackend
from hotseat.train.packing import split_by_count
from hotseat.types import MicroBatch, Request, Sampling
from hotseat.vision import Vision, encoder_of, policy_class, tokens_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = 4
OPTIONS = TrainOptions(optimizer=AdamW(), schedule=Schedule(kind="constant", peak=1e-3), precision="bf16_master")


def batch_of(folder):
    segments, images = [], []
    for index in range(3 * PROMPTS):
        image = image_cases.write_pixels(folder, index % PROMPTS, 4, 2 + 2 * (index % 2))
        prompt = [3, *tokens_of(image), 4]
        segments.append((prompt, [5 + index, 6, 7, 8 + index % 3][: 2 + index % 3]))
        images.append((image,))
    return MicroBatch.from_segments(
        [torch.tensor([*prompt, *answer]) for prompt, answer in segments],
        [torch.arange(len(prompt) + len(answer)) >= len(prompt) for prompt, answer in segments],
        [str(index) for index in range(len(segments))],
        images=images,
    )


def weighted(batch):
    return replace(batch, weights=batch.mask / batch.mask.sum())


def backend_of(family, **changes):
    options = replace(OPTIONS, **changes)
    model = image_cases.make(family) if options.head == "policy" else image_cases.make_value(family)
    return FSDPBackend(model, options, device="cuda")


def surprise(outputs, batch):
    return -(outputs.log_probs * batch.weights).sum(), {}


def miss(outputs, batch):
    return ((outputs.values - 1).square() * batch.weights).sum(), {}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("head", ["policy", "value"])
def test_packed_and_padded_agree_and_learn_on_a_gpu(family, is_compiled, head, tmp_path):
    batch = weighted(batch_of(tmp_path))
    scores = {}
    for layout in ("padded", "auto"):
        backend = backend_of(family, layout=layout, compile=is_compiled, head=head)
        found = backend.log_probs([batch], 1.0) if head == "policy" else backend.values([batch])
        scores[layout] = torch.cat(found).cpu()[batch.mask]
        loss = surprise if head == "policy" else miss
        losses = [backend.update(split_by_count(batch, 6), loss, 1.0).loss for _ in range(20)]
        assert losses[-1] < losses[0] - 0.3
        backend.close()
    assert (scores["padded"] - scores["auto"]).abs().max() < 0.05


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_an_encoder_attends_to_all_images_at_once_as_it_would_to_each(family, tmp_path):
    model = image_cases.make(family).to("cuda", torch.bfloat16)
    encoder = encoder_of(model)
    images = [image_cases.write_pixels(tmp_path, index, 4, 4 + 4 * index) for index in range(3)]
    pixels = Vision.of(model).arguments(images, torch.device("cuda"))
    outputs = []
    for name in ("sdpa", IMAGE_ATTENTION):
        encoder.config._attn_implementation_internal = name
        encoder.zero_grad()
        out = encoder(pixels["pixel_values"].bfloat16(), pixels["image_grid_thw"]).last_hidden_state
        out.float().square().mean().backward()
        gradients = torch.cat([weight.grad.flatten() for weight in encoder.parameters() if weight.grad is not None])
        outputs.append((out.float(), gradients.float()))
    for one, other in zip(*outputs, strict=True):
        assert (one - other).norm() < 0.02 * one.norm()


def test_the_visual_encoder_leaves_the_gpu_with_the_rest_and_comes_back(tmp_path):
    batch = weighted(batch_of(tmp_path))
    backend = backend_of("qwen2_5_vl", compile=False)
    backend.update([batch], surprise, 1.0)
    digest, before = backend.digest(), torch.cuda.memory_allocated()
    away = backend.offload(PARTS)
    # Weights in fp32 and their copies in bf16, and two moments in fp32, of every parameter: little stays behind.
    num_parameters = sum(weight.numel() for weight in image_cases.make("qwen2_5_vl").parameters())
    assert before - torch.cuda.memory_allocated() >= num_parameters * 12
    assert backend.onload(PARTS).num_bytes == away.num_bytes
    assert backend.digest() == digest
    backend.close()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_an_engine_samples_what_it_scores_on_a_gpu(family, tmp_path):
    engine = TransformersEngine(
        image_cases.make(family), max_length=64, num_slots=8, options=SlotOptions(device="cuda", dtype=torch.bfloat16)
    )
    try:
        image = image_cases.write_pixels(tmp_path, 0)
        prompt = (3, *tokens_of(image), 4)
        made = engine.generate([Request(str(seed), prompt, Sampling(16), seed, (image,)) for seed in range(8)])
        again = engine.score([(*prompt, *each.token_ids) for each in made], 1.0, [(image,)] * 8)
        for each, score in zip(made, again, strict=True):
            assert each.log_probs == pytest.approx(score[len(prompt) :], abs=0.1)
    finally:
        engine.close()


def test_chunks_that_llava_decodes_in_graphs_are_scored_alike_by_its_own_forward(tmp_path):
    """More tokens than are sampled at once; from the second chunk on, a graph decodes."""
    name = image_cases.save("llava", tmp_path / "model")
    preparer = FramePreparer(load_processor(ModelSource(name), AutoTokenizer.from_pretrained(name)))
    random = np.random.default_rng(0)
    model_class = policy_class(AutoConfig.from_pretrained(name))
    engine, other = (
        TransformersEngine(
            model_class.from_pretrained(name), max_length=64, num_slots=20, options=SlotOptions(device, own_layers=own)
        )
        for device, own in (("cuda", True), ("cpu", False))
    )
    try:
        for round_ in range(3):
            frames = [preparer.prepare(random.integers(0, 256, (28, 28, 3)).astype(np.uint8)) for _ in range(20)]
            requests = [
                Request(
                    f"{round_}/{at}", (5, *frame.token_ids, 6), Sampling(20, ignore_eos=True), at, images=(frame.image,)
                )
                for at, frame in enumerate(frames)
            ]
            made = engine.generate(requests)
            whole = [(*request.token_ids, *each.token_ids) for request, each in zip(requests, made, strict=True)]
            scores = other.score(whole, 1.0, [request.images for request in requests])
            for request, each, score in zip(requests, made, scores, strict=True):
                assert each.finish == "stop" or len(each.token_ids) == 20
                assert each.log_probs == pytest.approx(score[len(request.token_ids) :], abs=1e-3)
    finally:
        engine.close()
        other.close()
