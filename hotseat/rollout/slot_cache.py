"""The KV cache by slots, the cache of prefixes, and the interface of models that use the two (`SlotModel`).

Beside the KV cache are states of linear attention (`slot_states`), for models that have it.

`LlamaSlots` runs the layers of Llama-like models itself; `AnySlots` calls the forward of any other model. Both read the
live parameters of the module.

A row's result must not depend on the rows it shares a batch with. Matrix products of one row take another kernel than
those of several, and (oneDNN on ARM, 640 inputs or more) those of up to 8 another than those of more; vectorised
functions treat the last few numbers of a tensor in another way than the rest. So rows and keys come in multiples of
`ROWS`. Masked keys add exact zeros, so the number of keys that others need does not matter. All this is tested.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotseat.vision import Vision

ROWS = 16


def padded(count: int) -> int:
    """Round up to a multiple of `ROWS`."""
    return -(-count // ROWS) * ROWS


def _wide(tensor: Tensor) -> Tensor:
    """View a tensor that is to be copied as int64 where its layout allows: the fewer elements, the faster the copy."""
    ratio = 8 // tensor.element_size()
    steps = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    return tensor.view(torch.int64) if tensor.stride(-1) == 1 and not any(n % ratio for n in steps) else tensor


def _copy(target: Tensor, source: Tensor) -> None:
    """Write `source` to `target`, both [..., dim] of one type."""
    wide_target, wide_source = _wide(target), _wide(source)
    if wide_target.dtype == wide_source.dtype:
        target, source = wide_target, wide_source
    target.copy_(source)


def _stack(parts: Sequence[Tensor]) -> Tensor:
    wide = [_wide(part) for part in parts]
    if any(part.dtype != torch.int64 for part in wide):
        return torch.stack(list(parts))
    return torch.stack(wide).view(parts[0].dtype)


@dataclass(frozen=True)
class Prefix:
    """KV cache of a token sequence, and the states behind its last token, to be copied into slots."""

    keys: Tensor  # [layers, kv_heads, num_tokens, key_dim]
    values: Tensor  # [layers, kv_heads, num_tokens, value_dim]
    states: tuple[Tensor, ...] = ()  # [layers, ...] of each kind; the layers have linear attention, and no KV cache
    routing: np.ndarray[Any, Any] | None = None  # [num_tokens, width]: experts, where they are recorded

    @property
    def num_tokens(self) -> int:
        return int(self.keys.shape[2])

    @property
    def num_bytes(self) -> int:
        return int(self.keys.nbytes + self.values.nbytes) + sum(states.nbytes for states in self.states)


Context = tuple[tuple[int, ...], tuple[str, ...]]  # token ids, and the images of their placeholders


class PrefixCache:
    """A cache of prefixes by their exact tokens and images; the least recently used goes first.

    A part of a longer prefix never serves: it would be computed by other kernels than the whole, and the last bits of a
    sample would depend on what was asked before.
    """

    def __init__(self, max_tokens: int, tokens_per_state: int = 0):
        """Make the cache. tokens_per_state: what the states of a prefix take, in tokens of the KV cache."""
        self.max_tokens = max_tokens
        self._tokens_per_state = tokens_per_state
        self._prefixes: OrderedDict[Context, Prefix] = OrderedDict()
        self._num_tokens = 0
        self.num_bytes = 0

    def __contains__(self, context: Context) -> bool:
        return context in self._prefixes

    def cost(self, context: Context) -> int:
        """Return the room of a context's prefix, in tokens."""
        return len(context[0]) + self._tokens_per_state

    def get(self, context: Context) -> Prefix | None:
        prefix = self._prefixes.get(context)
        if prefix is not None:
            self._prefixes.move_to_end(context)
        return prefix

    def put(self, context: Context, prefix: Prefix) -> None:
        num_tokens = self.cost(context)
        if num_tokens > self.max_tokens:
            return
        self._prefixes[context] = prefix
        self._num_tokens += num_tokens
        self.num_bytes += prefix.num_bytes
        while self._num_tokens > self.max_tokens:
            oldest, evicted = self._prefixes.popitem(last=False)
            self._num_tokens -= self.cost(oldest)
            self.num_bytes -= evicted.num_bytes

    def clear(self) -> None:
        self._prefixes.clear()
        self._num_tokens = self.num_bytes = 0


class SlotCache:
    """KV cache and states of every slot. Zeros where nothing was written, since a NaN that is masked stays NaN."""

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_heads: int,
        max_keys: int,
        dims: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        states: Sequence[Tensor] = (),
    ):
        """Make the cache. states: one slot's of each kind, [layers, ...], as examples of shapes and types."""
        self._states_like = [((each.shape[0], num_slots, *each.shape[1:]), each.dtype) for each in states]
        self._shapes = [(num_layers, num_slots, num_heads, max_keys, dim) for dim in dims]
        self._dtype, self._device = dtype, device
        self.num_slots, self.max_keys = num_slots, max_keys
        self.allocate()

    def allocate(self) -> None:
        self.keys, self.values = (torch.zeros(s, dtype=self._dtype, device=self._device) for s in self._shapes)
        self.states = [torch.zeros(shape, dtype=dtype, device=self._device) for shape, dtype in self._states_like]
        # Views, made once: per layer [slots, heads, max_keys, dim] and [slots * heads * max_keys, dim].
        self.layers = list(zip(self.keys.unbind(), self.values.unbind(), strict=True))
        self._flat = [(k.view(-1, k.shape[-1]), v.view(-1, v.shape[-1])) for k, v in self.layers]
        # [slots, heads]: the row of each slot's and head's first key in the flattened cache of one layer.
        slots, heads, max_keys = self._shapes[0][1:4]
        self._first_row = (torch.arange(slots * heads, device=self._device) * max_keys).view(slots, heads)

    def free(self) -> None:
        self.keys = self.values = torch.empty(0, dtype=self._dtype, device=self._device)
        self.layers, self._flat, self.states = [], [], []

    @property
    def num_bytes(self) -> int:
        return int(self.keys.nbytes + self.values.nbytes) + sum(states.nbytes for states in self.states)

    @property
    def tokens_per_state(self) -> int:
        """Return how many tokens of the KV cache take as much as the states of a slot."""
        of_states = sum(states.nbytes for states in self.states)
        return -(-of_states * self.max_keys // int(self.keys.nbytes + self.values.nbytes))

    def rows_at(self, positions: Tensor) -> Tensor:
        """Find where keys of slots 0, 1, ... at these positions go in a flattened layer: [rows] -> [rows * heads]."""
        return (self._first_row[: positions.shape[0]] + positions[:, None]).flatten()

    def append(self, layer: int, at: Tensor, key: Tensor, value: Tensor) -> None:
        """Write one key and one value per slot, [rows, heads, dim] each, to the rows `at` of a flattened layer."""
        keys, values = self._flat[layer]
        if key.is_cuda:  # without a copy of what is a part of something larger
            at = at.view(key.shape[:2])
            keys.index_put_((at,), key)
            values.index_put_((at,), value)
            return
        keys.index_copy_(0, at, key.reshape(-1, keys.shape[1]))
        values.index_copy_(0, at, value.reshape(-1, values.shape[1]))

    def write(self, slots: Sequence[int], prefix: Prefix) -> None:
        """Write the same prefix into each of these slots."""
        first, last = min(slots), max(slots)
        # Slots next to each other, as samples of a prompt mostly get them, are one copy.
        runs = [slice(first, last + 1)] if last - first + 1 == len(slots) else [slice(s, s + 1) for s in slots]
        for run in runs:
            _copy(self.keys[:, run, :, : prefix.num_tokens], prefix.keys[:, None])
            _copy(self.values[:, run, :, : prefix.num_tokens], prefix.values[:, None])
            for states, source in zip(self.states, prefix.states, strict=True):
                states[:, run] = source[:, None]

    def move(self, sources: Tensor, targets: Tensor, num_keys: int) -> None:
        """Copy states and the first keys of some slots to others, layer by layer: [count] int64 each."""
        for layer in self.layers:
            for cache in layer:
                cache[targets, :, :num_keys] = cache[sources, :, :num_keys]
        for states in self.states:
            for each in states:
                each[targets] = each[sources]

    def erase(self, slot: int) -> None:
        self.keys[:, slot] = 0
        self.values[:, slot] = 0
        self.begin([slot])

    def begin(self, slots: Sequence[int]) -> None:
        """Reset the states of slots to those before a first token: keys of others are masked, states are not."""
        for states in self.states:
            states[:, list(slots)] = 0

    def read(self, num_slots: int, num_keys: int, device: torch.device) -> tuple[Tensor, ...]:
        """Copy the KV cache and the states of the first slots to another device."""
        parts = [cache[:, :num_slots, :, :num_keys] for cache in (self.keys, self.values)]
        parts += [states[:, :num_slots] for states in self.states]
        return tuple(part.to(device, copy=True) for part in parts)

    def put(self, keys: Tensor, values: Tensor, *states: Tensor) -> None:
        """Write what `read` returned back into the first slots."""
        for own, saved in zip(self.states, states, strict=True):
            own[:, : saved.shape[1]] = saved.to(self._device)
        self.keys[:, : keys.shape[1], :, : keys.shape[3]] = keys.to(self._device)
        self.values[:, : values.shape[1], :, : values.shape[3]] = values.to(self._device)


RowsOfImages = Sequence[Sequence[str]]  # of each row; empty: no row has any
# A kind of batch of contexts: most rows, and what else must be equal.
ImageBatch = tuple[int, tuple[int, ...]]
NO_IMAGES: ImageBatch = (0, ())


class SlotModel(ABC):
    """A model over slots. Tokens and positions are int64 on the model's device."""

    cache: SlotCache
    max_forward_tokens: int  # of one prefill or scoring forward, unless a single sequence is longer
    has_shifts = False  # positions of tokens after images may differ from their number

    def __init__(self, model: Any):
        self._vision = Vision.of(model)
        self.sees_images = self._vision is not None

    def step_shape(self, num_rows: int, num_keys: int) -> tuple[int, int]:
        """Return the numbers of rows and keys to call `decode` with, at least these."""
        return padded(num_rows), padded(num_keys)

    @abstractmethod
    def prefill(self, tokens: Tensor, lengths: Sequence[int], images: RowsOfImages = ()) -> list[Prefix]:
        """Compute the prefix of each row of [batch, padded length] tokens, cut to its length.

        images: those of each row, as `image_batch` allows them together.
        """

    @abstractmethod
    def image_batch(self, length: int, images: Sequence[str], index: int) -> ImageBatch:
        """Return the kind of batch for a context with images: those of one kind and length may share a forward.

        index: of the context, which is part of the kind where it has a forward of its own.
        """

    @abstractmethod
    def decode(self, tokens: Tensor, positions: Tensor, num_keys: int, shifts: Tensor | None = None) -> Tensor:
        """Append one token to each of the first slots. [rows], [rows] -> [rows, vocab] float32 logits.

        num_keys: how many keys of each slot to look at; past its position a row's keys are masked. shifts [rows]: to
        add to the positions that the model computes angles from.
        """

    def shift(self, token_ids: Sequence[int], images: Sequence[str]) -> int:
        """Return how far the positions of tokens after these are from their number: an image's may be fewer."""
        return 0

    def release(self) -> None:  # noqa: B027
        """Forget what refers to the memory of weights and cache: it is about to move."""

    @abstractmethod
    def hidden(self, tokens: Tensor, lengths: Sequence[int] = (), images: RowsOfImages = ()) -> Tensor:
        """Compute what `logits` takes, for scoring: [batch, padded length] -> [batch, padded length, ...].

        images: those of each row, whose lengths are given then.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits from rows of `hidden`: [rows, ...] -> [rows, vocab] float32."""


def causal_bias(positions: Tensor, num_keys: int, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """Make an attention bias, [rows] -> [rows, 1, 1, num_keys]: 0 for keys that the row sees, else -inf.

    A row sees keys up to its position, with a `window` only the last of them.
    """
    keys = torch.arange(num_keys, device=positions.device)
    is_seen = keys <= positions[:, None]
    if window is not None:
        is_seen &= keys > positions[:, None] - window
    bias = torch.zeros(is_seen.shape, dtype=dtype, device=positions.device)
    return bias.masked_fill_(~is_seen, -torch.inf)[:, None, None, :]


def cut_prefixes(
    keys: Sequence[Tensor], values: Sequence[Tensor], lengths: Sequence[int], states: Sequence[tuple[Tensor, ...]] = ()
) -> list[Prefix]:
    """Cut keys and values, per layer [batch, kv_heads, length, dim], into one prefix per row with its own memory.

    states: of each row, where there are any.
    """
    return [
        Prefix(_stack([k[b, :, :n] for k in keys]), _stack([v[b, :, :n] for v in values]), states[b] if states else ())
        for b, n in enumerate(lengths)
    ]


def without_last(tokens: Tensor, lengths: Sequence[int], images: RowsOfImages) -> Tensor:
    """Replace the last token of contexts with images, which predicts nothing, and may be a sampled placeholder."""
    if not any(images):
        return tokens
    last = torch.tensor(lengths, device=tokens.device)[:, None] - 1
    return tokens.scatter(1, last, 0)
