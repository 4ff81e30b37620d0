"""Device memory: errors that say there was too little, the peak of a trial, and a micro-batch for trials."""

from __future__ import annotations

import gc
from typing import NamedTuple

import torch

from hotseat.types import MicroBatch, segment_offsets

MARGIN = 0.04  # of a device's memory that the largest micro-batch must leave: for fragments, and for other processes
# Texts of the same error from libraries that do not raise torch's own.
_WORDS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that a device had too little memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


def release_memory(device: torch.device) -> None:
    """Give unused memory back to the device: leftovers of a failure, and the allocator's cache."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Peak(NamedTuple):
    """Bytes on a device: in use before a trial, most in use during it, and the limit of this process."""

    before: int
    most: int
    limit: int

    def has_headroom(self, times: float = 1.0) -> bool:
        """Tell whether a micro-batch `times` as large would leave a margin."""
        return self.before + times * (self.most - self.before) <= self.limit


class Meter:
    """Measures the peak of memory in use on a device. On a CPU nothing is measured, and everything fits."""

    def __init__(self, device: torch.device):
        self._device = device
        self._is_measured = device.type == "cuda"
        self._before = 0
        if self._is_measured:
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)

    def peak(self) -> Peak:
        if not self._is_measured:
            return Peak(0, 0, 0)
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        limit = free + torch.cuda.memory_reserved(self._device) - int(MARGIN * total)
        return Peak(self._before, torch.cuda.max_memory_allocated(self._device), limit)


def trial_batch(
    num_tokens: int, max_length: int, vocab_size: int, *, is_padded: bool = False, is_shared: bool = False
) -> MicroBatch:
    """Make a micro-batch of about so many made-up tokens in sequences of `max_length`, half of each to be learned from.

    As in `packing.filler_batch`, no count is one and there are never just two equal lengths, so that what is compiled
    for it serves real micro-batches. No two sequences begin alike, unless with `is_shared`.
    """
    lengths = [max_length] * (num_tokens // max_length)
    rest = num_tokens - sum(lengths)
    if rest > 1 and not (is_padded and lengths):
        lengths.append(rest)
    if len(lengths) == 1 and lengths[0] > 4:
        lengths = [lengths[0] - lengths[0] // 3, lengths[0] // 3]
    sizes = torch.tensor(lengths)
    offsets = segment_offsets(sizes)
    segment = torch.repeat_interleave(torch.arange(len(lengths)), sizes)
    position = torch.arange(int(offsets[-1])) - offsets[segment]
    mask = position >= sizes[segment] // 2
    return MicroBatch(
        token_ids=(torch.where(is_shared & ~mask, 0, segment) + 7 * position) % vocab_size,
        offsets=offsets,
        mask=mask,
        weights=torch.zeros(len(segment)),
        sample_ids=tuple(f"trial {index}" for index in range(len(lengths))),
    )
