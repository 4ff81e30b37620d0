"""Micro-batches: how the segments of a step are cut into them, and how one is laid out for a model.

Which segments go together changes speed and memory, never the maths (see `MicroBatch`), so the cut is made for speed:
by a fixed number of segments, longest first, or by a token budget that is never exceeded. Both are deterministic. What
must stand together (the segments of an episode, the two answers of a pair) is a unit and is never cut.

A model gets the tokens in one of four layouts. All but `whole` are without the last
token of a segment: nothing comes after it.

    padded   [num_segments, longest] rows, padded on the right. Attention is causal, so no token sees the padding.
    packed   [1, num_tokens], without padding. Positions restart with every segment, and attention is kept inside
             them by `attention`.
    shared   packed, and a context that several segments begin with, such as the prompt of a group, stands there once.
    whole    [1, num_tokens], with the last token of each segment: for models that take numbers step by step.

Sequence-parallel ranks (`sequence`) each get a slice of the packed or shared row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hotseat.algorithms.routing import ROUTING
from hotseat.errors import BatchError
from hotseat.train.attention import Blocks
from hotseat.train.divergence import Teaching
from hotseat.train.input_layout import InputTokens, in_one_row, in_padded_rows
from hotseat.train.sequence import SequenceGroup, Slice
from hotseat.types import MicroBatch, segment_offsets, to_device
from hotseat.vision import Vision, tokens_of

LayoutKind = Literal["auto", "padded", "packed", "shared", "whole"]

# Gathering queries, keys and values into rows and back, in every layer, costs as much as this share of extra tokens (a
# 4-layer, 128-wide Llama on 2 cores). With flash attention only shared contexts need it.
_COST_OF_GATHERING = 0.10


# --- which segments go together ---------------------------------------------------------------------------------------


def split_by_count(
    batch: MicroBatch, max_segments: int, *, allow_longer: bool = False, by_images: bool = False
) -> list[MicroBatch]:
    """Cut a batch into micro-batches of at most `max_segments` segments, segments of like length together.

    allow_longer: a unit with more segments than that is a micro-batch by itself; otherwise it is an error. by_images:
    those with the same images stay next to each other.
    """
    if max_segments < 1:
        raise BatchError(f"{max_segments} segments per micro-batch: set it to 1 or more")
    members = _members(batch)
    lengths = _lengths(batch)
    largest = max((len(unit) for unit in members), default=0)
    if largest > max_segments and not allow_longer:
        raise BatchError(
            f"an episode (or pair) of {largest} segments does not fit micro-batches of {max_segments}: set the number"
            f" of segments per micro-batch to {largest} or more"
        )
    bins: list[list[int]] = []
    groups = _groups(batch, members) if by_images else [[unit] for unit in members]
    groups.sort(key=lambda group: -max(lengths[segment] for unit in group for segment in unit))
    for unit in itertools.chain(*groups):
        if not bins or len(bins[-1]) + len(unit) > max_segments:
            bins.append([])
        bins[-1].extend(unit)
    return _take_all(batch, bins)


def split_by_tokens(
    batch: MicroBatch, max_tokens: int, *, padded: bool = False, allow_longer: bool = False, by_images: bool = False
) -> list[MicroBatch]:
    """Cut a batch into as few micro-batches of at most `max_tokens` as first-fit decreasing finds, then even them out.

    padded: padding counts too, as number of segments x longest. allow_longer: a unit with more tokens than that is a
    micro-batch by itself; otherwise it is an error. by_images: segments with the same images stay
    together, unless that takes more micro-batches than to fill one after the other.
    """
    members = _members(batch)
    lengths = _lengths(batch)

    def tokens(segments: Sequence[int]) -> int:
        if padded:
            return len(segments) * max((lengths[segment] for segment in segments), default=0)
        return sum(lengths[segment] for segment in segments)

    for unit in members if not allow_longer else ():
        if tokens(unit) > max_tokens:
            raise BatchError(
                f"sample {batch.sample_ids[unit[0]]} has {tokens(unit)} tokens, a micro-batch at most {max_tokens}:"
                f" raise the token budget to {tokens(unit)}, or lower the longest prompt and answer"
            )
    groups = _groups(batch, members) if by_images else []
    has_groups = 0 < len(groups) < len(members)
    if has_groups:
        in_order = list(itertools.chain(*groups))
        members = [part for group in groups for part in _filled(group, max_tokens, tokens)]
    bins = _first_fit_decreasing(members, lengths, max_tokens, padded)
    if has_groups:
        bins = min(bins, _filled(in_order, max_tokens, tokens), key=len)
    even = balance([sum(lengths[segment] for segment in unit) for unit in members], len(bins))
    evened = [[segment for unit in part for segment in members[unit]] for part in even]
    if all(tokens(segments) <= max_tokens or len(part) == 1 for part, segments in zip(even, evened, strict=True)):
        bins = evened
    return _take_all(batch, bins)


def take(batch: MicroBatch, segments: Sequence[int]) -> MicroBatch:
    """Make a micro-batch of these segments, in this order."""
    index = torch.as_tensor(segments, dtype=torch.int64)
    starts = batch.offsets[index]
    lengths = batch.offsets[index + 1] - starts
    offsets = segment_offsets(lengths)
    tokens = torch.arange(int(offsets[-1])) + torch.repeat_interleave(starts - offsets[:-1], lengths)
    return MicroBatch(
        token_ids=batch.token_ids[tokens],
        offsets=offsets,
        mask=batch.mask[tokens],
        weights=batch.weights[tokens],
        # If there are as many tokens as segments, every segment is one token, and both indices are the same.
        fields={
            name: values[tokens] if values.shape[0] == batch.num_tokens else values[index]
            for name, values in batch.fields.items()
        },
        sample_ids=tuple(batch.sample_ids[segment] for segment in segments),
        images=_any_images(batch.images[segment] for segment in segments) if batch.images else (),
    )


def join(batches: Sequence[MicroBatch]) -> MicroBatch:
    """Join micro-batches: all their segments, one after another. They must have the same fields."""
    first = batches[0]
    lengths = torch.cat([batch.offsets[1:] - batch.offsets[:-1] for batch in batches])
    return MicroBatch(
        token_ids=torch.cat([batch.token_ids for batch in batches]),
        offsets=segment_offsets(lengths),
        mask=torch.cat([batch.mask for batch in batches]),
        weights=torch.cat([batch.weights for batch in batches]),
        fields={name: torch.cat([batch.fields[name] for batch in batches]) for name in first.fields},
        sample_ids=tuple(sample_id for batch in batches for sample_id in batch.sample_ids),
        images=_any_images(images for batch in batches for images in batch.images or ((),) * batch.num_segments),
    )


def _any_images(images: Iterable[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Return the images of each segment; nothing if no segment has any."""
    listed = tuple(images)
    return listed if any(listed) else ()


def with_ends(batch: MicroBatch) -> MicroBatch:
    """Add one token to each segment, the only one under the mask: a value model's number there is for the segment.

    Fields are dropped. Weights are 0: the caller sets them, at `offsets[1:] - 1`.
    """
    num_segments = batch.num_segments
    offsets = batch.offsets + torch.arange(num_segments + 1)
    ends = offsets[1:] - 1
    mask = torch.zeros(int(offsets[-1]), dtype=torch.bool)
    mask[ends] = True
    token_ids = torch.zeros(len(mask), dtype=batch.token_ids.dtype)
    token_ids[~mask] = batch.token_ids
    return MicroBatch(token_ids, offsets, mask, torch.zeros(len(mask)), {}, batch.sample_ids, batch.images)


def _members(batch: MicroBatch) -> list[list[int]]:
    """List the segments of each unit, which is a sample id, units in order of first appearance."""
    members: dict[str, list[int]] = {}
    for segment, unit in enumerate(batch.sample_ids):
        members.setdefault(unit, []).append(segment)
    return list(members.values())


def _groups(batch: MicroBatch, members: list[list[int]]) -> list[list[list[int]]]:
    """Group units whose first segments have the same images, in order of first appearance; others are alone."""
    groups: dict[Hashable, list[list[int]]] = {}
    for unit in members:
        images = batch.images[unit[0]] if batch.images else ()
        groups.setdefault(images or unit[0], []).append(unit)
    return list(groups.values())


def _filled(members: list[list[int]], max_tokens: int, tokens: Callable[[Sequence[int]], int]) -> list[list[int]]:
    """Fill one bin after the other with units, in their order."""
    bins: list[list[int]] = []
    for unit in members:
        if not bins or tokens([*bins[-1], *unit]) > max_tokens:
            bins.append([])
        bins[-1].extend(unit)
    return bins


def _lengths(batch: MicroBatch) -> list[int]:
    return (batch.offsets[1:] - batch.offsets[:-1]).tolist()


def _first_fit_decreasing(
    members: list[list[int]], lengths: list[int], max_tokens: int, padded: bool
) -> list[list[int]]:
    bins: list[list[int]] = []
    sums: list[int] = []
    longest: list[int] = []
    for unit in sorted(members, key=lambda unit: -sum(lengths[segment] for segment in unit)):
        added = sum(lengths[segment] for segment in unit)
        length = max(lengths[segment] for segment in unit)
        for place, segments in enumerate(bins):
            filled = (len(segments) + len(unit)) * max(longest[place], length) if padded else sums[place] + added
            if filled <= max_tokens:
                break
        else:
            place = len(bins)
            bins.append([])
            sums.append(0)
            longest.append(0)
        bins[place].extend(unit)
        sums[place] += added
        longest[place] = max(longest[place], length)
    return bins


def balance(sizes: list[int], num_parts: int) -> list[list[int]]:
    """Distribute indices into `sizes`, largest first, each to the part that has least so far (the first of equals)."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [0] * num_parts
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        place = loads.index(min(loads))
        parts[place].append(index)
        loads[place] += sizes[index]
    return parts


def _take_all(batch: MicroBatch, bins: list[list[int]]) -> list[MicroBatch]:
    return [take(batch, segments) for segments in sorted(sorted(segments) for segments in bins if segments)]


# --- what a model takes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelInput:
    """Tokens in the layout that the model runs, and which of its outputs predict the tokens that are scored."""

    input_ids: Tensor  # [num_segments, longest] or [1, num_rows]
    # [1, num_rows] when packed; None: counted from the left. Where images have positions in three dimensions:
    # [3, 1, num_rows] or [3, num_segments, longest].
    position_ids: Tensor | None
    blocks: Blocks | None  # how packed tokens fall into segments; None when padded
    rows: Tensor  # [num_scored]: the row of the flattened output that predicts each scored token
    targets: Tensor  # [num_scored]: that token
    tokens: Tensor  # [num_scored]: where it stands in the micro-batch
    counts: Tensor | None = None  # [rows of the flattened output] float: tokens of each, 0: padding; if asked for
    pixels: Mapping[str, Tensor] = field(default_factory=dict)  # further arguments of a VLM
    teaching: Teaching | None = None  # of a policy that learns from a teacher, or of that teacher
    routing: Tensor | None = None  # [rows of the flattened output, width]: see `algorithms.routing`


def model_input(
    batch: MicroBatch,
    kind: LayoutKind,
    *,
    device: torch.device | None = None,
    has_flash: bool = False,
    group: SequenceGroup | None = None,
    with_counts: bool = False,
    vision: Vision | None = None,
    teaching: Teaching | None = None,
    num_before: int | None = None,
    with_routing: bool = False,
) -> ModelInput:
    """Lay a micro-batch out for the model.

    Log-probs or values are computed for tokens under the mask, except for the first of a segment. With a `group` of
    several ranks the layout is packed, and cut to this rank's slice. `vision` prepares images. `teaching`: what there
    is to do about a teacher. `num_before`: see `Blocks.of`. `with_routing`: lay out recorded experts.
    """
    if kind == "whole":
        every, scored = (to_device(each, device) for each in (batch.token_ids, batch.mask.nonzero()[:, 0]))
        return ModelInput(every[None], None, None, scored, every[scored], scored)
    token_ids, offsets, mask = (tensor.cpu() for tensor in (batch.token_ids, batch.offsets, batch.mask))
    all_lengths = offsets[1:] - offsets[:-1]
    lengths = torch.where(all_lengths > 1, all_lengths - 1, all_lengths)  # of what the model reads
    segment = torch.repeat_interleave(torch.arange(batch.num_segments), lengths)  # [num_inputs]
    starts = segment_offsets(lengths)
    position = torch.arange(len(segment)) - starts[segment]
    indices = offsets[segment] + position  # [num_inputs]: where each input token stands in the micro-batch
    axes = _axes(vision, batch, token_ids[indices], starts) if batch.images else None
    recorded = batch.fields[ROUTING].cpu()[indices] if with_routing and ROUTING in batch.fields else None
    inputs = InputTokens(token_ids[indices], lengths, starts, segment, position, axes, recorded)

    scored, before = _scored(mask, offsets, starts)
    is_alone = group is None or group.size == 1
    owners = _owners(batch, token_ids, offsets, mask, lengths, starts, vision) if kind in ("auto", "shared") else None
    if kind == "auto":
        num_padded = batch.num_segments * int(lengths.max()) if is_alone else math.inf
        kind = _cheapest(num_padded, len(indices), owners, has_flash)
    if kind != "shared":
        owners = None
    if kind == "padded":
        layout, row_of = in_padded_rows(inputs)
    else:
        layout, row_of = in_one_row(inputs, owners, device, num_before, has_flash=has_flash, is_filled=is_alone)
    rows = row_of[before]
    if kind != "padded" and group is not None and not is_alone:
        part = Slice(group, layout.input_ids.shape[1])
        layout = layout.cut(part)
        is_mine = (rows >= part.first) & (rows < part.first + part.length)
        rows, scored = rows[is_mine] - part.first, scored[is_mine]
    pixels = _pixels(batch, starts, owners, vision, device) if batch.images and vision is not None else {}
    if teaching is not None:
        teaching = teaching.of(batch.fields, scored, device)
    moved = (layout.input_ids, rows, token_ids[scored], scored)
    input_ids, rows, targets, scored = (to_device(tensor, device) for tensor in moved)
    position_ids = None if layout.position_ids is None else to_device(layout.position_ids, device)
    routing = None if layout.routing is None else to_device(layout.routing, device)
    counts = to_device(layout.counts, device) if with_counts else None
    return ModelInput(input_ids, position_ids, layout.blocks, rows, targets, scored, counts, pixels, teaching, routing)


def _scored(mask: Tensor, offsets: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return where tokens that are scored stand in the micro-batch, and the input token that predicts each."""
    each = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets[1:] - offsets[:-1])  # the segment
    scored = (mask & (torch.arange(len(mask)) > offsets[each])).nonzero().squeeze(-1)
    return scored, starts[each[scored]] + scored - 1 - offsets[each[scored]]


def _axes(vision: Vision | None, batch: MicroBatch, token_ids: Tensor, starts: Tensor) -> Tensor | None:
    """Return positions in three dimensions, segment after segment: [3, num_inputs]; None: the model has one."""
    assert vision is not None, "images, and the model is no VLM"
    if not vision.has_axes:
        return None
    each = zip(itertools.pairwise(starts.tolist()), batch.images, strict=True)
    return torch.cat([vision.positions(token_ids[begin:end], images) for (begin, end), images in each], dim=1)


def _pixels(
    batch: MicroBatch, starts: Tensor, owners: Tensor | None, vision: Vision, device: torch.device | None
) -> Mapping[str, Tensor]:
    """Prepare images: one that is in a shared context only for the first segment with it."""
    owned = list(range(batch.num_segments))
    if owners is not None:
        begins = starts.tolist()[:-1]
        owned = [index for index, start in enumerate(begins) if int(owners[start]) == start]
    return vision.arguments([image for index in owned for image in batch.images[index]], device)


def _owners(
    batch: MicroBatch,
    token_ids: Tensor,
    offsets: Tensor,
    mask: Tensor,
    lengths: Tensor,
    starts: Tensor,
    vision: Vision | None,
) -> Tensor | None:
    """Find the input token that stands for each, in the first segment with the same context: [num_inputs].

    A context is what precedes the first token under the mask, with all images of the segment. None: all differ.
    """
    owners = np.arange(int(starts[-1]))  # slices of an array take a tenth of the time of a tensor's
    seen: dict[tuple[bytes, tuple[str, ...]], int] = {}
    tokens, is_sampled = token_ids.numpy(), mask.numpy()
    is_any = False
    bounds, sizes, firsts = offsets.tolist(), lengths.tolist(), starts.tolist()
    for segment, begin in enumerate(bounds[:-1]):
        sampled = is_sampled[begin : bounds[segment + 1]]
        size = min(int(sampled.argmax()) if sampled.any() else len(sampled), sizes[segment])
        if size == 0:
            continue
        images = batch.images[segment] if batch.images else ()
        if images and vision is not None:
            rest = tokens[begin + size : begin + sizes[segment]]
            if (rest == vision.image_token_id).any():
                continue  # its images stand after the context, too
        owner = seen.setdefault((tokens[begin : begin + size].tobytes(), images), segment)
        if owner != segment:
            is_any = True
            owners[firsts[segment] : firsts[segment] + size] = np.arange(firsts[owner], firsts[owner] + size)
    return torch.from_numpy(owners) if is_any else None


def _cheapest(num_padded: float, num_packed: int, owners: Tensor | None, has_flash: bool) -> LayoutKind:
    num_shared = num_packed if owners is None else int(owners.unique().numel())
    costs: dict[LayoutKind, float] = {
        "padded": math.inf if has_flash else num_padded,
        "packed": num_packed * (1 if has_flash else 1 + _COST_OF_GATHERING),
        "shared": num_shared * (1 + _COST_OF_GATHERING),
    }
    return min(costs, key=lambda kind: costs[kind])


def image_filler(image: str) -> MicroBatch:
    """Make a micro-batch with a prepared image that counts for nothing.

    A rank whose micro-batch has no image runs it too: its visual encoder takes part in what all ranks do together.
    """
    token_ids = torch.tensor([*tokens_of(image), 0])
    mask = torch.arange(len(token_ids)) == len(token_ids) - 1
    offsets = torch.tensor([0, len(token_ids)])
    return MicroBatch(token_ids, offsets, mask, torch.zeros(len(token_ids)), {}, ("",), ((image,),))


def filler_batch() -> MicroBatch:
    """Make a micro-batch that counts for nothing, for a rank without work to run while the others run theirs.

    None of its counts is one and no two are equal: a compiler would take either for a rule.
    """
    return MicroBatch(
        token_ids=torch.zeros(13, dtype=torch.int64),
        offsets=torch.tensor([0, 4, 13]),
        mask=torch.arange(13) >= 11,
        weights=torch.zeros(13),
        sample_ids=("", ""),
    )
