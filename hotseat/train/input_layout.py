"""Layouts of the tokens that a model reads: padded rows, or one row without padding."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from hotseat.algorithms.routing import unknown_routing
from hotseat.train.attention import Blocks
from hotseat.train.sequence import Slice
from hotseat.types import segment_offsets


@dataclass(frozen=True)
class InputTokens:
    """Tokens that a model reads, segment after segment."""

    token_ids: Tensor  # [num_inputs]
    lengths: Tensor  # [num_segments]
    starts: Tensor  # [num_segments + 1]
    segment: Tensor  # [num_inputs]
    position: Tensor  # [num_inputs]: in the segment
    axes: Tensor | None  # [3, num_inputs]: positions in three dimensions
    routing: Tensor | None  # [num_inputs, width]


@dataclass(frozen=True)
class InputLayout:
    """Fields of `ModelInput` that do not depend on what is scored."""

    input_ids: Tensor
    position_ids: Tensor | None
    counts: Tensor
    routing: Tensor | None
    blocks: Blocks | None = None

    def cut(self, part: Slice) -> InputLayout:
        """Return a rank's slice of one row."""
        assert self.position_ids is not None
        assert self.blocks is not None
        return InputLayout(
            part.of(self.input_ids),
            part.of(self.position_ids),
            part.of(self.counts[None])[0],
            None if self.routing is None else part.of(self.routing.mT).mT,
            replace(self.blocks, slice=part),
        )


def in_padded_rows(inputs: InputTokens) -> tuple[InputLayout, Tensor]:
    """Lay tokens out in rows, one for each segment; return the row of the flattened output of each, too."""
    longest = int(inputs.lengths.max())
    row_of = inputs.segment * longest + inputs.position
    input_ids = torch.zeros(len(inputs.lengths), longest, dtype=torch.int64)
    input_ids[inputs.segment, inputs.position] = inputs.token_ids
    position_ids = None
    if inputs.axes is not None:
        position_ids = torch.zeros(3, *input_ids.shape, dtype=torch.int64)
        position_ids[:, inputs.segment, inputs.position] = inputs.axes
    routing = None
    if inputs.routing is not None:
        routing = unknown_routing(input_ids.numel(), inputs.routing)
        routing[row_of] = inputs.routing
    counts = torch.bincount(row_of, minlength=input_ids.numel()).float()
    return InputLayout(input_ids, position_ids, counts, routing), row_of


def in_one_row(
    inputs: InputTokens,
    owners: Tensor | None,
    device: torch.device | None,
    num_before: int | None,
    *,
    has_flash: bool,
    is_filled: bool,
) -> tuple[InputLayout, Tensor]:
    """Lay tokens out in one row; return the row of the flattened output of each, too.

    owners: the input token that stands for each in a shared context; None: nothing is shared. is_filled: flash
    attention gets rows in a number that others have.
    """
    num_inputs, lengths, starts = len(inputs.token_ids), inputs.lengths, inputs.starts
    # The input token of each row, the row of each input.
    first, row_of = torch.unique(torch.arange(num_inputs) if owners is None else owners, return_inverse=True)
    input_ids = inputs.token_ids[first][None]
    position_ids = inputs.position[first][None] if inputs.axes is None else inputs.axes[:, None, first]
    routing = None if inputs.routing is None else inputs.routing[first]
    is_shared, counts = len(first) < num_inputs, torch.bincount(row_of, minlength=len(first)).float()
    gathered = row_of
    if has_flash and is_filled:
        num_filler = _num_missing(len(first) + is_shared) + is_shared  # one row at least, if rows are gathered
        gathered = torch.cat([row_of, torch.arange(len(first), len(first) + num_filler)])
        if is_shared:  # attention gathers more rows than there are: of the last one, which is a filler
            gathered = functional.pad(gathered, (0, _num_missing(len(gathered))), value=int(gathered[-1]))
        lengths = torch.cat([lengths, _cut(len(gathered) - num_inputs, int(lengths.max()))])
        starts = segment_offsets(lengths)
        input_ids, position_ids, counts = (
            functional.pad(tensor, (0, num_filler)) for tensor in (input_ids, position_ids, counts)
        )
        if routing is not None:
            routing = torch.cat([routing, unknown_routing(num_filler, routing)])
    blocks = Blocks.of(
        lengths, starts, gathered if is_shared else None, device=device, has_flash=has_flash, num_before=num_before
    )
    return InputLayout(input_ids, position_ids, counts, routing, blocks), row_of


def _num_missing(num_rows: int) -> int:
    """Return how many rows are missing to a number that other micro-batches have, too.

    On a GPU each new number costs time: memory of new sizes, kernels chosen anew, sometimes compiled. Between a power
    of two and the next there are sixteen numbers, so at most a sixteenth is computed in vain.
    """
    return -num_rows % max(16, 1 << max(0, num_rows.bit_length() - 5))


def _cut(num_tokens: int, longest: int) -> Tensor:
    """Cut tokens into segments of at most `longest`: return their lengths."""
    rest = num_tokens % longest
    return torch.tensor([longest] * (num_tokens // longest) + [rest] * (rest > 0), dtype=torch.int64)
