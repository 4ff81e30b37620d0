"""Cuts a rank's samples into micro-batches and runs them; with smaller ones again if its device runs out of memory.

The cut changes nothing but speed and rounding, so a token budget that the run chose may become smaller at any time; a
budget that the user set is left alone, and the error says what to change. A single rank repeats the whole call: an
optimizer step starts again from zero gradients, with the random numbers that it began with. Several ranks cannot repeat
it, because the others wait in the middle of it: the run ends, and can be resumed with a smaller budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NoReturn, TypeVar

from hotseat.errors import BudgetError, DeviceMemoryError
from hotseat.planning.budgets import Use
from hotseat.train.backend import Backend
from hotseat.train.packing import split_by_count, split_by_tokens
from hotseat.types import MicroBatch

Result = TypeVar("Result")

_DOING = {"train": "an update", "rollout": "scoring"}


@dataclass(frozen=True)
class BatchSettings:
    """Size of a rank's micro-batches: a number of sequences, or of tokens."""

    micro_batch_size: int | None  # sequences; None: `max_tokens` is the size
    max_tokens: int | None
    is_padded: bool = False  # padding counts as tokens
    is_chosen: bool = False  # the run chose `max_tokens` and may lower it
    num_devices: int = 1  # over which each micro-batch is sharded

    def cut(self, batch: MicroBatch) -> list[MicroBatch]:
        """Cut a batch into micro-batches of this size.

        A sample with more sequences or tokens than that is a micro-batch by itself: how many an agent will make of an
        episode is not known before it has, and a sequence that is too long by itself is refused before the run.

        Samples of a prompt with images stay together where sequences are packed: its images are then encoded once.
        """
        if batch.num_segments == 0:
            return []
        by_images = bool(batch.images) and not self.is_padded
        if self.max_tokens is not None:
            return split_by_tokens(
                batch, self.max_tokens, padded=self.is_padded, allow_longer=True, by_images=by_images
            )
        assert self.micro_batch_size is not None, "neither sequences nor tokens were chosen"
        return split_by_count(batch, self.micro_batch_size, allow_longer=True, by_images=by_images)


class MicroBatcher:
    """Cuts one rank's batches and runs them on its backend; lowers its token budgets when memory runs out."""

    def __init__(self, backend: Backend):
        self._backend = backend
        self._lowered: dict[Use, int] = {}  # tokens of a micro-batch

    def run(
        self,
        use: Use,
        settings: BatchSettings,
        cut: Callable[[BatchSettings], list[MicroBatch]],
        work: Callable[[list[MicroBatch]], Result],
    ) -> tuple[list[MicroBatch], Result]:
        """Cut a batch, run the micro-batches, and return both; repeat with smaller ones until they fit in memory.

        use: whose token budget counts. cut: makes the micro-batches. work: runs them on the backend.
        """
        while True:
            current = self.current(use, settings)
            pieces = cut(current)
            try:
                return pieces, work(pieces)
            except DeviceMemoryError as error:
                shortage = error
            self._lowered[use] = _smaller(use, current, pieces, shortage)

    def current(self, use: Use, settings: BatchSettings) -> BatchSettings:
        """Return the settings in use on this rank: with its padding, and a budget that was lowered."""
        settings = replace(settings, is_padded=settings.is_padded or self._backend.is_padded)
        if settings.max_tokens is None or not settings.is_chosen or use not in self._lowered:
            return settings
        return replace(settings, max_tokens=min(settings.max_tokens, self._lowered[use]))

    def lowered(self, num_devices: int = 1) -> dict[Use, int]:
        """Return the lowered budgets per device, where each micro-batch is sharded over `num_devices` devices."""
        return {use: max(1, tokens // num_devices) for use, tokens in self._lowered.items()}


def num_tokens(batch: MicroBatch, is_padded: bool) -> int:
    """Return the number of tokens that a micro-batch is computed on, padding included."""
    lengths = batch.offsets[1:] - batch.offsets[:-1]
    return len(lengths) * int(lengths.max()) if is_padded else batch.num_tokens


def _smaller(use: Use, settings: BatchSettings, pieces: list[MicroBatch], error: DeviceMemoryError) -> int:
    """Return the token budget to continue with after one of the pieces did not fit. Raises if the run must end."""
    what = f"out of device memory in {_DOING[use]}"
    # A rank without a piece of its own runs an empty one, because the others' collectives wait for it.
    piece = pieces[error.index] if error.index < len(pieces) else None
    if piece is not None and len(set(piece.sample_ids)) == 1:
        raise DeviceMemoryError(
            f"{what}: sample {piece.sample_ids[0]} with {piece.num_tokens:,} tokens does not fit by itself"
            f" ({error}): lower data.max_length, let all layers recompute (train.gradient_checkpointing: true,"
            " train.checkpointed_layers: null), offload more parts (enable_offload), or use more devices"
        )
    if not settings.is_chosen:
        _refuse(use, settings, what, error)
    assert settings.max_tokens is not None
    size = settings.max_tokens if piece is None else num_tokens(piece, settings.is_padded)
    smaller = max(1, size // 2)
    if error.is_undone:
        return smaller
    raise too_large(use, what, size, settings.num_devices, error)


def too_large(use: Use, what: str, size: int, num_devices: int, error: DeviceMemoryError) -> BudgetError:
    """Return the error for a micro-batch of `size` tokens that cannot be repeated with fewer."""
    tokens = max(1, size // 2 // num_devices)
    return BudgetError(
        f"{what} with a micro-batch of {size:,} tokens ({error}), which cannot be repeated here: set"
        f" {use}.chosen_tokens_per_device to {tokens}, or, if there is a checkpoint, use `hotseat resume`, which does",
        use,
        tokens,
    )


def _refuse(use: Use, settings: BatchSettings, what: str, error: DeviceMemoryError) -> NoReturn:
    if settings.max_tokens is not None:
        tokens = settings.max_tokens // settings.num_devices
        raise DeviceMemoryError(
            f"{what} with {use}.max_tokens_per_device {tokens} ({error}): set it to {max(1, tokens // 2)}, or remove it"
            f" and leave {use}.micro_batch_size at auto"
        )
    size = settings.micro_batch_size or 1
    raise DeviceMemoryError(
        f"{what} with {use}.micro_batch_size {size} ({error}): set it to {max(1, size // 2)}, or to auto"
    )
