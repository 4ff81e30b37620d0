"""Scenarios of two ranks of a model that sees images; alone, one rank does the work of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import image_cases
import torch

from hotseat.train.backend import LoraOptions, TrainOptions
from hotseat.train.packing import split_by_count
from hotseat.types import MicroBatch
from hotseat.vision import tokens_of

from .conformance import OPTIONS, ClippedLoss, Make, Scenario, ValueLoss, outcome


def work_of(directory: Path, step: int) -> list[MicroBatch]:
    """Four micro-batches: three with images, one of text alone."""
    generator = torch.Generator().manual_seed(step)
    segments, masks, images = [], [], []
    for index in range(8):
        seen = () if index > 5 else (image_cases.write_pixels(directory, index // 2, 4, 2 + 2 * (index % 2)),)
        prompt = [3, *(token for image in seen for token in tokens_of(image)), 4 + index]
        answer = torch.randint(3, 30, (4 + index % 3,), generator=generator)
        segments.append(torch.cat([torch.tensor(prompt), answer]))
        masks.append(torch.arange(len(segments[-1])) >= len(prompt))
        images.append(seen)
    old = [torch.randn(len(each), generator=generator) * 0.1 - 3 for each in segments]
    advantages = [torch.randn(len(each), generator=generator) for each in segments]
    fields = {"old_log_probs": old, "advantages": advantages}
    batch = MicroBatch.from_segments(segments, masks, [str(at) for at in range(8)], fields, images)
    batch = replace(batch, weights=batch.mask / batch.mask.sum())
    return [piece for first in (0, 2, 4, 6) for piece in split_by_count(_only(batch, first), 2)]


def _only(batch: MicroBatch, first: int) -> MicroBatch:
    from hotseat.train.packing import take

    return take(batch, [first, first + 1])


def _trains(first_share: int, options: TrainOptions = OPTIONS, family: str = "qwen2_5_vl") -> Scenario:
    """How many of four micro-batches the first rank gets. The last one has no images."""

    def scenario(make: Make, rank: int, num_ranks: int, directory: Path) -> dict[str, Any]:
        filler = image_cases.write_pixels(directory, 99)
        is_policy = options.head == "policy"
        model = image_cases.make(family) if is_policy else image_cases.make_value(family)
        backend = make(model, replace(options, filler_image=filler))
        facts, scores = [], []
        for step in range(2):
            work = work_of(directory, step)
            mine = work if num_ranks == 1 else (work[:first_share], work[first_share:])[rank]
            report = backend.update(mine, ClippedLoss() if is_policy else ValueLoss(), 0.9)
            facts.append((report.loss, report.grad_norm))
            scores += backend.log_probs(work, 0.9) if is_policy else backend.values(work)
            if options.lora is not None:
                with backend.without_adapters():  # the policy as its own reference
                    scores += backend.log_probs(work, 0.9)
        return outcome(backend, facts, scores)

    return scenario


SCENARIOS: dict[str, Scenario] = {
    "one_rank_has_no_images": _trains(3),
    "one_rank_has_nothing": _trains(4, family="qwen3_vl"),
    "recomputed": _trains(2, replace(OPTIONS, gradient_checkpointing=True)),
    "frozen_encoder": _trains(3, replace(OPTIONS, freeze_visual_encoder=True)),
    "adapters": _trains(3, replace(OPTIONS, lora=LoraOptions(rank=2, alpha=4.0))),
    "value_model": _trains(3, replace(OPTIONS, head="value")),
    "value_model_with_nothing": _trains(4, replace(OPTIONS, head="value", gradient_checkpointing=True), "qwen3_vl"),
}
