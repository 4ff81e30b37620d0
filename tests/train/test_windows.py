"""Visual encoders that attend within windows: all windows in one call, as on a CUDA device, give the same.

The kernel is `varlen_on_cpu`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import image_cases
import pytest
import torch

from hotseat.train import attention
from hotseat.train.attention import IMAGE_ATTENTION
from hotseat.train.backend import AdamW, Outputs, TrainOptions
from hotseat.train.fsdp import FSDPBackend
from hotseat.train.schedule import Schedule
from hotseat.types import MicroBatch
from hotseat.vision import encoder_of, tokens_of

from . import varlen_on_cpu

assert varlen_on_cpu
OPTIONS = TrainOptions(optimizer=AdamW(), schedule=Schedule(kind="constant", peak=1e-3))


def batch_of(folder: Path) -> MicroBatch:
    """Answers to questions about images of several sizes, two about each: of one window, and of several."""
    segments, images = [], []
    for index, (rows, columns) in enumerate([(4, 4), (4, 4), (8, 12), (8, 12), (2, 6)]):
        image = image_cases.write_pixels(folder, index // 2, rows, columns)
        prompt = [3, *tokens_of(image), 4]
        segments.append((len(prompt), [*prompt, 5 + index, 6, 7]))
        images.append((image,))
    batch = MicroBatch.from_segments(
        [torch.tensor(tokens) for _, tokens in segments],
        [torch.arange(len(tokens)) >= size for size, tokens in segments],
        [str(index) for index in range(len(segments))],
        images=images,
    )
    return MicroBatch(**vars(batch) | {"weights": batch.mask / batch.mask.sum()})


def surprise(outputs: Outputs, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, Any]]:
    assert outputs.log_probs is not None
    return -(outputs.log_probs * batch.weights).sum(), {}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.long)])
def test_all_windows_in_one_call_give_what_they_give_one_by_one(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(tmp_path)
    log_probs, norms = [], []
    for is_flash in (False, True):
        monkeypatch.setattr(attention, "has_flash", lambda *_, is_flash=is_flash: is_flash)
        model = image_cases.make(family)
        backend = FSDPBackend(model, OPTIONS, device="cpu")
        assert encoder_of(model).config._attn_implementation == IMAGE_ATTENTION
        log_probs.append(backend.log_probs([batch], 1.0)[0])
        norms.append(backend.update([batch], surprise, 1.0).grad_norm)
        backend.close()
    assert torch.allclose(log_probs[0], log_probs[1], rtol=0, atol=1e-5)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.mark.slow
def test_encoders_without_windows_keep_their_attention() -> None:
    model = image_cases.make("llava")
    FSDPBackend(model, OPTIONS, device="cpu").close()
    assert encoder_of(model).config._attn_implementation == "sdpa"
