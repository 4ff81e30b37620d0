"""Any causal model of transformers over slots, through its own forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, LinearAttentionLayer

from hotseat.algorithms.delta_rule import DELTA_FAMILIES
from hotseat.algorithms.head import HALVES, project
from hotseat.errors import UnsupportedError
from hotseat.placement.memory_terms import SHARED_FORWARD_TOKENS
from hotseat.rollout.slot_cache import (
    ROWS,
    ImageBatch,
    Prefix,
    RowsOfImages,
    SlotCache,
    SlotModel,
    causal_bias,
    cut_prefixes,
    padded,
    without_last,
)
from hotseat.rollout.slot_states import STATES, DecodeStep, Rows, by_layer, use_states
from hotseat.vision import set_attention


class _SlotLayer(CacheLayerMixin):
    """One layer of a `SlotCache`, in the form in which models of transformers use it."""

    is_sliding = False

    def __init__(self, cache: SlotCache, index: int):
        super().__init__()
        self._cache, self._index = cache, index
        self.at, self.num_keys = torch.empty(0), 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows = key_states.shape[0]
        self._cache.append(self._index, self.at, key_states[:, :, 0], value_states[:, :, 0])
        keys, values = self._cache.layers[self._index]
        return keys[:rows, :, : self.num_keys], values[:rows, :, : self.num_keys]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.num_keys, 0

    def get_seq_length(self) -> int:
        return self.num_keys - 1

    def get_max_length(self) -> int:
        return self._cache.max_keys


def check_config(model_config: Any, max_length: int) -> None:
    """Raise if a model of this config has state that slots do not have, or its angles depend on lengths."""
    config, name = model_config.get_text_config(), type(model_config).__name__.removesuffix("Config")
    layer_types = set(getattr(config, "layer_types", None) or ())
    known = {"full_attention", "sliding_attention"}
    if config.model_type in DELTA_FAMILIES:
        known.add("linear_attention")
    if not layer_types <= known:
        raise UnsupportedError(
            f"{name} has layers of type {', '.join(sorted(layer_types))}: the transformers engine knows"
            " full_attention and sliding_attention, and linear_attention of Qwen3.5; use the vLLM engine"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope" and max_length > (config.original_max_position_embeddings or 0):
        raise UnsupportedError(
            f"{name}: beyond {config.original_max_position_embeddings} tokens the angles of longrope depend on the"
            f" longest sequence of the batch; set max_length {max_length} to at most that, or use the vLLM engine"
        )


class AnySlots(SlotModel):
    """Any causal model with a KV cache, through its own forward with masks and positions of ours.

    Layers with linear attention, which have states instead, are in `slot_states`.
    """

    max_forward_tokens = SHARED_FORWARD_TOKENS  # few, because scoring holds the logits of all of them

    def __init__(self, model: Any, num_slots: int, max_length: int, device: torch.device, fp32_head: bool):
        super().__init__(model)
        self._model = model
        self.has_shifts = self._vision is not None and self._vision.has_axes
        if fp32_head:
            _widen_head(model)
        config = model.config.get_text_config()
        name = type(model).__name__
        if config._attn_implementation not in ("sdpa", "eager"):
            raise UnsupportedError(
                f"{name} with attention {config._attn_implementation!r}: the transformers engine masks each slot by"
                ' itself, which takes attn_implementation="sdpa" or "eager"'
            )
        check_config(model.config, max_length)
        if getattr(config, "attn_logit_softcapping", None) is not None:
            set_attention(model, "eager")  # transformers' other kernels leave out the cap of the scores
        self._window = getattr(config, "sliding_window", None)
        self._layer_types = set(getattr(config, "layer_types", None) or ())

        self._nets = use_states(model)
        self._linear = {net.layer_idx for net in self._nets}
        try:
            tokens = torch.zeros(1, ROWS, dtype=torch.int64, device=device)
            probe, work = self._new_cache([ROWS], device)
            model(input_ids=tokens, past_key_values=probe, use_cache=True, **work)
        except (TypeError, ValueError, AttributeError) as error:
            raise UnsupportedError(
                f"{name} takes no cache of keys and values ({error}): use the vLLM engine"
            ) from error
        layers = self._attention_layers(probe)
        is_plain = all(type(layer) is DynamicLayer and layer.keys is not None for layer in layers)
        shapes = {(tuple(layer.keys.shape), tuple(layer.values.shape)) for layer in layers if is_plain}
        if len(shapes) != 1:
            raise UnsupportedError(
                f"{name} does not keep keys and values of one shape in every layer: use the vLLM engine"
            )
        ((_, num_heads, _, key_dim), (*_, value_dim)) = next(iter(shapes))
        self.cache = SlotCache(
            len(layers),
            padded(num_slots),
            num_heads,
            max(padded(max_length), 2 * ROWS),  # as many as the check below takes
            (key_dim, value_dim),
            layers[0].keys.dtype,
            device,
            work[STATES].of_row(0) if work else (),
        )
        self._slot_layers = [_SlotLayer(self.cache, index) for index in range(len(layers))]
        each = iter(self._slot_layers)
        self._all_layers = [
            LinearAttentionLayer() if index in self._linear else next(each) for index in range(len(probe.layers))
        ]
        self._check_against_forward(device)

    def _check_against_forward(self, device: torch.device) -> None:
        """Raise unless decoding one token equals the whole forward: some models read masks in ways of their own."""
        tokens = torch.arange(2 * ROWS, device=device)[None] % self._model.get_input_embeddings().weight.shape[0]
        name = type(self._model).__name__
        try:
            expected = self._eager_logits(tokens)[0, ROWS].float()
            (prefix,) = self.prefill(tokens[:, :ROWS], [ROWS])
            self.cache.write([0], prefix)
            row = torch.zeros(ROWS, dtype=torch.int64, device=device)
            row[0] = ROWS
            got = self.decode(tokens[0, row], row, 2 * ROWS)[0]
            self.cache.erase(0)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise UnsupportedError(f"{name} cannot be run slot by slot ({error}): use the vLLM engine") from error
        difference = float((got - expected).abs().max())
        allowed = (1e-3 if self.cache.keys.dtype == torch.float32 else 5e-2) * float(expected.abs().max())
        if not difference <= allowed:
            raise UnsupportedError(
                f"{name}: cached decoding disagrees with a full forward (by {difference:.2g}, at most {allowed:.2g} is"
                " rounding): use the vLLM engine"
            )

    def _eager_logits(self, tokens: Tensor) -> Tensor:
        """Compute logits by eager attention: in its faster kernels transformers leaves out score caps and sinks."""
        used = self._model.config.get_text_config()._attn_implementation
        set_attention(self._model, "eager")
        try:
            logits: Tensor = self._model(input_ids=tokens, use_cache=False).logits
        finally:
            set_attention(self._model, used)
        return logits

    def _masks(self, positions: Tensor, num_keys: int) -> Tensor | dict[str, Tensor | None]:
        dtype = self.cache.keys.dtype
        full = causal_bias(positions, num_keys, dtype)
        if self._nets:
            return {"full_attention": full, "linear_attention": None}
        if self._window is None or self._layer_types == {"full_attention"}:
            return full
        sliding = causal_bias(positions, num_keys, dtype, self._window)
        if not self._layer_types:
            return sliding
        return {"full_attention": full, "sliding_attention": sliding}

    def _new_cache(self, lengths: Sequence[int], device: torch.device) -> tuple[Any, dict[str, Any]]:
        """Return an empty cache for rows of these lengths, and arguments for layers with linear attention."""
        if not self._nets:
            return DynamicCache(), {}
        work = {STATES: Rows(torch.tensor(lengths, device=device))}
        return DynamicCache(config=self._model.config.get_text_config()), work

    def _attention_layers(self, cache: Any) -> list[Any]:
        return [layer for index, layer in enumerate(cache.layers) if index not in self._linear]

    def decode(self, tokens: Tensor, positions: Tensor, num_keys: int, shifts: Tensor | None = None) -> Tensor:
        at = self.cache.rows_at(positions)
        for layer in self._slot_layers:
            layer.at, layer.num_keys = at, num_keys
        work = {STATES: DecodeStep(by_layer(self._nets, self.cache.states))} if self._nets else {}
        output: Any = self._model(
            input_ids=tokens[:, None],
            position_ids=(positions if shifts is None else positions + shifts)[:, None],
            attention_mask=self._masks(positions, num_keys),
            past_key_values=Cache(layers=list(self._all_layers)),
            use_cache=True,
            **work,
        )
        logits: Tensor = output.logits[:, -1]
        return logits.float()

    def image_batch(self, length: int, images: Sequence[str], index: int) -> ImageBatch:
        """Small contexts whose images are of the same shapes go together, by `ROWS`; all others are alone."""
        assert self._vision is not None, "images, and the model is no VLM"
        shape = self._vision.common_shape(images)
        if shape is None or length * ROWS > self.max_forward_tokens:
            return 1, (index,)
        return ROWS, (len(images), *shape)

    def prefill(self, tokens: Tensor, lengths: Sequence[int], images: RowsOfImages = ()) -> list[Prefix]:
        cache, work = self._new_cache(lengths, tokens.device)
        tokens, arguments = self._seen(tokens, lengths, images)
        self._model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1, **arguments, **work)
        layers = self._attention_layers(cache)
        states = [work[STATES].of_row(row) for row in range(len(lengths))] if work else []
        return cut_prefixes([layer.keys for layer in layers], [layer.values for layer in layers], lengths, states)

    def hidden(self, tokens: Tensor, lengths: Sequence[int] = (), images: RowsOfImages = ()) -> Tensor:
        # Logits already: what stands between the last layer and them differs from model to model.
        num_rows = len(tokens)
        tokens, arguments = self._seen(without_last(tokens, lengths, images), lengths, images)
        if self._nets:
            arguments[STATES] = Rows(torch.full((len(tokens),), tokens.shape[1], device=tokens.device))
        logits: Tensor = self._model(input_ids=tokens, use_cache=False, **arguments).logits
        return logits[:num_rows]

    def shift(self, token_ids: Sequence[int], images: Sequence[str]) -> int:
        if self._vision is None or not self.has_shifts or not images:
            return 0
        return int(self._vision.positions(torch.tensor(token_ids), images).max()) + 1 - len(token_ids)

    def _seen(self, tokens: Tensor, lengths: Sequence[int], images: RowsOfImages) -> tuple[Tensor, dict[str, Tensor]]:
        """Return rows of tokens, and arguments for their images.

        Rows that may have company are filled up to `ROWS` by copies of the first: the visual encoder's matrix products
        must have as many rows whichever contexts come together.
        """
        if not any(images):
            return tokens, {}
        assert self._vision is not None, "images, and the model is no VLM"
        if self.image_batch(tokens.shape[1], images[0], 0)[0] == ROWS:
            images = [*images, *[images[0]] * (ROWS - len(images))]
            tokens = torch.cat([tokens, tokens[:1].expand(ROWS - len(tokens), -1)])
        arguments = self._vision.arguments([image for row in images for image in row], tokens.device)
        if self._vision.has_axes:
            token_ids, width = tokens.cpu(), tokens.shape[1]
            rows = [
                functional.pad(self._vision.positions(row[:length], seen), (0, width - length))
                for row, length, seen in zip(token_ids, lengths, images, strict=False)
            ]
            rows += [rows[0]] * (len(tokens) - len(rows))
            arguments["position_ids"] = torch.stack(rows, dim=1).to(tokens.device)  # [3, rows, length]
        return tokens, arguments

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden.float()


def _widen_head(model: Any) -> None:
    """Let the model's own forward compute float32 logits from 16-bit hidden states and weights."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.weight.dtype not in HALVES:
        return

    def forward(hidden: Tensor) -> Tensor:  # [..., hidden] -> [..., vocab]
        return project(hidden.flatten(0, -2), head.weight, head.bias).view(*hidden.shape[:-1], -1)

    head.forward = forward
