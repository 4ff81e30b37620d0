"""Device memory: whether an error says that there was too little, how much is left, and what to try it out with."""

from __future__ import annotations

import gc
from typing import NamedTuple

import torch

from hotseat.types import MicroBatch

MARGIN = 0.04  # of a device's memory that the largest micro-batch must leave: for fragments, and for other processes
# How libraries that do not raise torch's own error say it.
_WORDS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that a device had too little memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


def release_memory(device: torch.device) -> None:
    """Give back to the device what nothing uses: what is left of a failure, and fragments of the allocator."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Peak(NamedTuple):
    """Bytes on a device: in use at first, most in use since, and what this process could have."""

    before: int
    most: int
    limit: int

    def has_headroom(self, times: float = 1.0) -> bool:
        """Tell whether a micro-batch so many times as large would leave a margin."""
        return self.before + times * (self.most - self.before) <= self.limit


class Meter:
    """Measures the peak of what happens on a device. Where device and host memory are the same, everything fits."""

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


def trial_batch(num_tokens: int, max_length: int, vocab_size: int, *, is_padded: bool = False) -> MicroBatch:
    """A micro-batch of about so many made-up tokens in sequences of `max_length`, half of each to be learned from.

    As in `company`, nothing that is counted is one and no two lengths are all there is, so that what is compiled for
    it serves real micro-batches. No two sequences begin alike, so that none is shared.
    """
    lengths = [max_length] * (num_tokens // max_length)
    rest = num_tokens - sum(lengths)
    if rest > 1 and not (is_padded and lengths):
        lengths.append(rest)
    if len(lengths) == 1 and lengths[0] > 4:
        lengths = [lengths[0] - lengths[0] // 3, lengths[0] // 3]
    sizes = torch.tensor(lengths)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    segment = torch.repeat_interleave(torch.arange(len(lengths)), sizes)
    position = torch.arange(int(offsets[-1])) - offsets[segment]
    return MicroBatch(
        token_ids=(segment + 7 * position) % vocab_size,
        offsets=offsets,
        mask=position >= sizes[segment] // 2,
        weights=torch.zeros(len(segment)),
        sample_ids=tuple(f"trial {index}" for index in range(len(lengths))),
    )
