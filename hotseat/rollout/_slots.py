"""A causal language model over a fixed number of slots, each with room in the cache for one sequence.

Two implementations with one interface. `LlamaSlots` runs the layers of Llama-like models itself; `AnySlots` calls the
forward of whatever `AutoModelForCausalLM` gave. Both read the live parameters of the module.

A row's result must not depend on the rows it shares a batch with. Matrix products of one row take another kernel than
those of several, and (oneDNN on ARM, 640 inputs or more) those of up to 8 another than those of more; vectorised
functions treat the last few numbers of a tensor in another way than the rest. So rows and keys come in multiples of
`ROWS`. Masked keys add exact zeros, so the number of keys that others need does not matter. All this is tested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from hotseat.algorithms.head import HALVES, project
from hotseat.errors import NotBuiltError

ROWS = 16


def padded(count: int) -> int:
    return -(-count // ROWS) * ROWS


@dataclass(frozen=True)
class Prefix:
    """Keys and values of a token sequence, to be copied into slots."""

    keys: Tensor  # [layers, kv_heads, num_tokens, key_dim]
    values: Tensor  # [layers, kv_heads, num_tokens, value_dim]

    @property
    def num_tokens(self) -> int:
        return int(self.keys.shape[2])

    @property
    def num_bytes(self) -> int:
        return int(self.keys.nbytes + self.values.nbytes)


class SlotCache:
    """Keys and values of every slot. Zeros where nothing was written, since a masked NaN would still be one."""

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_heads: int,
        max_keys: int,
        dims: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self._shapes = [(num_layers, num_slots, num_heads, max_keys, dim) for dim in dims]
        self._dtype, self._device = dtype, device
        self.num_slots, self.max_keys = num_slots, max_keys
        self.allocate()

    def allocate(self) -> None:
        self.keys, self.values = (torch.zeros(s, dtype=self._dtype, device=self._device) for s in self._shapes)
        # Views, made once: per layer [slots, heads, max_keys, dim] and [slots * heads * max_keys, dim].
        self.layers = list(zip(self.keys.unbind(), self.values.unbind(), strict=True))
        self._flat = [(k.view(-1, k.shape[-1]), v.view(-1, v.shape[-1])) for k, v in self.layers]
        # [slots, heads]: the row of each slot's and head's first key in the flattened cache of one layer.
        slots, heads, max_keys = self._shapes[0][1:4]
        self._first_row = (torch.arange(slots * heads, device=self._device) * max_keys).view(slots, heads)

    def free(self) -> None:
        self.keys = self.values = torch.empty(0, dtype=self._dtype, device=self._device)
        self.layers, self._flat = [], []

    @property
    def num_bytes(self) -> int:
        return int(self.keys.nbytes + self.values.nbytes)

    def rows_at(self, positions: Tensor) -> Tensor:
        """[rows] -> [rows * heads]: where the keys of slots 0, 1, ... at these positions go in a flattened layer."""
        return (self._first_row[: positions.shape[0]] + positions[:, None]).flatten()

    def append(self, layer: int, at: Tensor, key: Tensor, value: Tensor) -> None:
        """key, value: [rows, heads, dim], one per slot."""
        keys, values = self._flat[layer]
        keys.index_copy_(0, at, key.reshape(-1, keys.shape[1]))
        values.index_copy_(0, at, value.reshape(-1, values.shape[1]))

    def write(self, slots: Sequence[int], prefix: Prefix) -> None:
        """The same prefix into each of these slots."""
        first, last = min(slots), max(slots)
        # Slots next to each other, as samples of a prompt mostly get them, are one copy.
        runs = [slice(first, last + 1)] if last - first + 1 == len(slots) else [slice(s, s + 1) for s in slots]
        for run in runs:
            self.keys[:, run, :, : prefix.num_tokens] = prefix.keys[:, None]
            self.values[:, run, :, : prefix.num_tokens] = prefix.values[:, None]

    def move(self, source: int, target: int, num_keys: int) -> None:
        for cache in (self.keys, self.values):
            cache[:, target, :, :num_keys] = cache[:, source, :, :num_keys]

    def erase(self, slot: int) -> None:
        self.keys[:, slot] = 0
        self.values[:, slot] = 0

    def read(self, num_slots: int, num_keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """A copy of the first slots, elsewhere."""
        keys, values = (cache[:, :num_slots, :, :num_keys] for cache in (self.keys, self.values))
        return keys.to(device, copy=True), values.to(device, copy=True)

    def put(self, keys: Tensor, values: Tensor) -> None:
        """What `read` gave, back into the first slots."""
        self.keys[:, : keys.shape[1], :, : keys.shape[3]] = keys.to(self._device)
        self.values[:, : values.shape[1], :, : values.shape[3]] = values.to(self._device)


class SlotModel(Protocol):
    """What the engine asks of a model. Tokens and positions are int64 on the model's device."""

    cache: SlotCache
    vocab_size: int
    max_forward_tokens: int  # of one prefill or scoring forward, unless a single sequence is longer

    def step_shape(self, num_rows: int, num_keys: int) -> tuple[int, int]:
        """The rows and keys to call `decode` with, for at least so many."""

    def prefill(self, tokens: Tensor, lengths: Sequence[int]) -> list[Prefix]:
        """[batch, padded length] -> the prefix of each row, cut to its length."""

    def decode(self, tokens: Tensor, positions: Tensor, num_keys: int) -> Tensor:
        """Append one token to each of the first slots. [rows], [rows] -> [rows, vocab] float32 logits.

        num_keys: how many keys of each slot to look at; past its position a row's keys are masked.
        """

    def release(self) -> None:
        """Forget what refers to the memory of weights and cache: it is about to move."""

    def hidden(self, tokens: Tensor) -> Tensor:
        """[batch, padded length] -> [batch, padded length, ...]: whatever `logits` wants, for scoring."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, ...] -> [rows, vocab] float32."""


def causal_bias(positions: Tensor, num_keys: int, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """[rows] -> [rows, 1, 1, num_keys]: 0 for keys up to the row's position (the last `window` of them), else -inf."""
    keys = torch.arange(num_keys, device=positions.device)
    is_seen = keys <= positions[:, None]
    if window is not None:
        is_seen &= keys > positions[:, None] - window
    bias = torch.zeros(is_seen.shape, dtype=dtype, device=positions.device)
    return bias.masked_fill_(~is_seen, -torch.inf)[:, None, None, :]


# --- Llama-like models ------------------------------------------------------------------------------------------------

_LLAMA_LIKE = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
# The angles of these depend on the position alone, not on the length of the sequence.
_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}


def is_llama_like(model: nn.Module, max_length: int) -> bool:
    """Whether `LlamaSlots` computes what the model's own forward does."""
    if type(model) not in _LLAMA_LIKE:
        return False
    assert isinstance(model, PreTrainedModel)
    config: Any = model.config
    window = getattr(config, "sliding_window", None)
    layer_types = (
        getattr(config, "layer_types", None)
        or ["full_attention" if window is None else "sliding_attention"] * config.num_hidden_layers
    )
    is_full = all(kind == "full_attention" for kind in layer_types) or (window is not None and window >= max_length)
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    num_linears = 7 * config.num_hidden_layers + 1
    is_plain = len(linears) == num_linears and all(type(m) is nn.Linear for m in linears)
    has_hooks = any(m._forward_hooks or m._forward_pre_hooks or hasattr(m, "_hf_hook") for m in model.modules())
    rope = getattr(config, "rope_parameters", None) or {}
    return is_full and is_plain and not has_hooks and rope.get("rope_type", "default") in _STATIC_ROPE


def _fuse(linears: Sequence[nn.Linear], in_major: bool) -> tuple[Tensor, Tensor | None]:
    """One [in, out] weight and one bias for linears with a common input; their parameters become views of them.

    in_major: lay the weight out as [in, out] in memory. On a CPU the product with an [out, in] weight goes through
    oneDNN on ARM, which repacks the weight in every call: 2 to 7 times slower at these sizes.
    """
    weights = [linear.weight.detach() for linear in linears]
    if in_major:
        fused = torch.cat([w.t() for w in weights], dim=1).contiguous()
        views = [v.t() for v in torch.split(fused, [w.shape[0] for w in weights], dim=1)]
    else:
        fused = torch.cat(weights)
        views = list(torch.split(fused, [w.shape[0] for w in weights]))
        fused = fused.t()
    for linear, view in zip(linears, views, strict=True):
        linear.weight.data = view
    if linears[0].bias is None:
        return fused, None
    biases = [linear.bias.detach() for linear in linears]
    bias = torch.cat(biases)
    for linear, view in zip(linears, torch.split(bias, [b.shape[0] for b in biases]), strict=True):
        linear.bias.data = view
    return fused, bias


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)


class _Norm:
    """The parameters of an RMSNorm; reading them off the module costs as much as using them."""

    def __init__(self, norm: Any):
        self.weight: Tensor = norm.weight
        self.eps: float = norm.variance_epsilon


def _rms_norm(x: Tensor, norm: _Norm) -> Tensor:
    weight, eps = norm.weight, norm.eps
    if x.dtype == torch.float32:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    # As transformers rounds: to the model's type before the product with the weight.
    return weight * F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)


class _Layer:
    """The parameters of one decoder layer, in the order of use."""

    def __init__(self, layer: Any, in_major: bool):
        attention, mlp = layer.self_attn, layer.mlp
        self.norm_1, self.norm_2 = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self.qkv, self.qkv_bias = _fuse([attention.q_proj, attention.k_proj, attention.v_proj], in_major)
        has_head_norms = hasattr(attention, "q_norm")
        self.q_norm = _Norm(attention.q_norm) if has_head_norms else None
        self.k_norm = _Norm(attention.k_norm) if has_head_norms else None
        self.out, self.out_bias = _fuse([attention.o_proj], in_major)
        self.gate_up, self.gate_up_bias = _fuse([mlp.gate_proj, mlp.up_proj], in_major)
        self.act = F.silu if isinstance(mlp.act_fn, nn.SiLU) else mlp.act_fn
        self.down, self.down_bias = _fuse([mlp.down_proj], in_major)


class _DecodeGraphs:
    """Decode steps as CUDA graphs, one per shape: launching their kernels one by one takes longer than running them.

    A shape is recorded when it comes for the third time. Recording refers to memory, so weights and cache must stay
    where they are (`clear` before they move); new values in the same memory are fine.
    """

    def __init__(self, decode: Callable[[Tensor, Tensor, int], Tensor]):
        self._decode = decode
        self.clear()

    def clear(self) -> None:
        self._counts: Counter[tuple[int, int]] = Counter()
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor, Tensor, Tensor]] = {}
        self._pool: Any = None

    def decode(self, tokens: Tensor, positions: Tensor, num_keys: int) -> Tensor:
        shape = (tokens.shape[0], num_keys)
        if shape not in self._graphs:
            logits = self._decode(tokens, positions, num_keys)
            self._counts[shape] += 1
            if self._counts[shape] == 3:
                self._record(shape, tokens, positions)
            return logits
        graph, own_tokens, own_positions, logits = self._graphs[shape]
        own_tokens.copy_(tokens)
        own_positions.copy_(positions)
        graph.replay()
        return logits

    def _record(self, shape: tuple[int, int], tokens: Tensor, positions: Tensor) -> None:
        graph, own_tokens, own_positions = torch.cuda.CUDAGraph(), tokens.clone(), positions.clone()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._decode(own_tokens, own_positions, shape[1])
        self._graphs[shape] = (graph, own_tokens, own_positions, logits)


class LlamaSlots:
    """Llama, Mistral, Qwen2 and Qwen3 without what their modules cost in Python.

    Query, key and value projections are one matrix, gate and up another; the module's parameters become views of them,
    so the module, its weights and their digests stay live.
    """

    max_forward_tokens = 4096

    def __init__(self, model: Any, num_slots: int, max_length: int, device: torch.device, fp32_head: bool):
        config = model.config
        self._num_heads = config.num_attention_heads
        self._num_kv_heads = config.num_key_value_heads
        self._head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._groups = self._num_heads // self._num_kv_heads
        self._norm = _Norm(model.model.norm)
        self._embedding = model.model.embed_tokens.weight
        in_major = device.type == "cpu"
        self._layers = [_Layer(layer, in_major) for layer in model.model.layers]
        # With tied embeddings this moves the embedding too: it is the same parameter.
        self._head, _ = _fuse([model.lm_head], in_major)
        self._has_fp32_head = fp32_head and self._head.dtype in HALVES
        self.vocab_size = int(self._embedding.shape[0])

        max_keys = padded(max_length)
        positions = torch.arange(max_keys, device=device)[None]
        cos, sin = model.model.rotary_emb(self._embedding[:1], positions)  # [1, max_keys, head_dim]
        # rotate_half(x) = [-x2, x1] is a roll by half with the first half of the sine negated.
        sin = torch.cat([-sin[..., : self._head_dim // 2], sin[..., self._head_dim // 2 :]], dim=-1)
        self._cos, self._sin = cos[0].contiguous(), sin[0].contiguous()
        self.cache = SlotCache(
            len(self._layers),
            padded(num_slots),
            self._num_kv_heads,
            max_keys,
            (self._head_dim, self._head_dim),
            self._embedding.dtype,
            device,
        )
        self._graphs = _DecodeGraphs(self._decode) if device.type == "cuda" else None

    def _heads(self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[rows, hidden] -> query [rows, heads, dim], key and value [rows, kv_heads, dim], rotated."""
        num_heads, num_kv = self._num_heads, self._num_kv_heads
        qkv = _linear(_rms_norm(x, layer.norm_1), layer.qkv, layer.qkv_bias)
        qkv = qkv.view(x.shape[0], num_heads + 2 * num_kv, self._head_dim)
        qk, value = qkv[:, : num_heads + num_kv], qkv[:, num_heads + num_kv :]
        if layer.q_norm is not None and layer.k_norm is not None:
            qk = torch.cat([_rms_norm(qk[:, :num_heads], layer.q_norm), _rms_norm(qk[:, num_heads:], layer.k_norm)], 1)
        qk = torch.addcmul(qk * cos, qk.roll(self._head_dim // 2, -1), sin)
        return qk[:, :num_heads], qk[:, num_heads:], value

    def _rest(self, layer: _Layer, x: Tensor, attended: Tensor) -> Tensor:
        """What follows the attention: [rows, hidden], [rows, heads * dim] -> [rows, hidden]."""
        x = x + _linear(attended, layer.out, layer.out_bias)
        gate, up = _linear(_rms_norm(x, layer.norm_2), layer.gate_up, layer.gate_up_bias).chunk(2, dim=1)
        return x + _linear(layer.act(gate) * up, layer.down, layer.down_bias)

    def step_shape(self, num_rows: int, num_keys: int) -> tuple[int, int]:
        if self._graphs is None:
            return padded(num_rows), padded(num_keys)
        # Few shapes, since each is recorded: powers of two, and for keys three between.
        rows, keys = ROWS, 128
        while rows < num_rows:
            rows *= 2
        while keys < num_keys:
            keys *= 2
        keys = next(k for k in (5 * keys // 8, 6 * keys // 8, 7 * keys // 8, keys) if k >= num_keys)
        return min(rows, self.cache.num_slots), min(keys, self.cache.max_keys)

    def release(self) -> None:
        if self._graphs is not None:
            self._graphs.clear()

    def decode(self, tokens: Tensor, positions: Tensor, num_keys: int) -> Tensor:
        if self._graphs is None:
            return self._decode(tokens, positions, num_keys)
        return self._graphs.decode(tokens, positions, num_keys)

    def _decode(self, tokens: Tensor, positions: Tensor, num_keys: int) -> Tensor:
        rows = tokens.shape[0]
        x = F.embedding(tokens, self._embedding)
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]  # [rows, 1, head_dim]
        bias = causal_bias(positions, num_keys, x.dtype)
        at = self.cache.rows_at(positions)
        for index, layer in enumerate(self._layers):
            query, key, value = self._heads(layer, x, cos, sin)
            self.cache.append(index, at, key, value)
            keys, values = self.cache.layers[index]
            # The query heads of a group share keys: they are so many queries of one head.
            attended = F.scaled_dot_product_attention(
                query.reshape(rows, self._num_kv_heads, self._groups, self._head_dim),
                keys[:rows, :, :num_keys],
                values[:rows, :, :num_keys],
                attn_mask=bias,
            )
            x = self._rest(layer, x, attended.reshape(rows, -1))
        return self.logits(x)

    def _forward(self, tokens: Tensor, with_prefix: bool) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        batch, length = tokens.shape
        x = F.embedding(tokens.flatten(), self._embedding)
        cos, sin = (t[:length].repeat(batch, 1)[:, None] for t in (self._cos, self._sin))
        keys, values = [], []
        for layer in self._layers:
            heads = self._heads(layer, x, cos, sin)
            query, key, value = (h.reshape(batch, length, -1, self._head_dim).transpose(1, 2) for h in heads)
            if with_prefix:
                keys.append(key)
                values.append(value)
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self._groups > 1)
            x = self._rest(layer, x, attended.transpose(1, 2).reshape(batch * length, -1))
        return x, keys, values

    def prefill(self, tokens: Tensor, lengths: Sequence[int]) -> list[Prefix]:
        _, keys, values = self._forward(tokens, with_prefix=True)
        return _prefixes(keys, values, lengths)

    def hidden(self, tokens: Tensor) -> Tensor:
        return self._forward(tokens, with_prefix=False)[0].view(*tokens.shape, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        hidden = _rms_norm(hidden, self._norm)
        return project(hidden, self._head.t()) if self._has_fp32_head else torch.mm(hidden, self._head).float()


def _prefixes(keys: Sequence[Tensor], values: Sequence[Tensor], lengths: Sequence[int]) -> list[Prefix]:
    """Per layer [batch, kv_heads, length, dim] -> one prefix per row, with memory of its own."""
    return [
        Prefix(torch.stack([k[b, :, :n] for k in keys]), torch.stack([v[b, :, :n] for v in values]))
        for b, n in enumerate(lengths)
    ]


# --- any other model --------------------------------------------------------------------------------------------------


class _SlotLayer(CacheLayerMixin):
    """One layer of a `SlotCache` as transformers models want to see it."""

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
    """Raise if a model of this config keeps more than keys and values per token, or its angles depend on lengths."""
    config, name = model_config.get_text_config(), type(model_config).__name__.removesuffix("Config")
    layer_types = set(getattr(config, "layer_types", None) or ())
    if not layer_types <= {"full_attention", "sliding_attention"}:
        raise NotBuiltError(
            f"{name} has layers of type {', '.join(sorted(layer_types))}: the transformers engine knows"
            " full_attention and sliding_attention; use the vLLM engine"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope" and max_length > (config.original_max_position_embeddings or 0):
        raise NotBuiltError(
            f"{name}: beyond {config.original_max_position_embeddings} tokens the angles of longrope depend on the"
            f" longest sequence of the batch; set max_length {max_length} to at most that, or use the vLLM engine"
        )


class AnySlots:
    """Any causal model with keys and values per token, through its own forward with masks and positions of ours."""

    max_forward_tokens = 1024  # Scoring holds their logits.

    def __init__(self, model: Any, num_slots: int, max_length: int, device: torch.device, fp32_head: bool):
        self._model = model
        if fp32_head:
            _widen_head(model)
        config = model.config.get_text_config()
        name = type(model).__name__
        if config._attn_implementation not in ("sdpa", "eager"):
            raise NotBuiltError(
                f"{name} with attention {config._attn_implementation!r}: the transformers engine masks each slot by"
                ' itself, which takes attn_implementation="sdpa" or "eager"'
            )
        check_config(model.config, max_length)
        if getattr(config, "attn_logit_softcapping", None) is not None:
            model.set_attn_implementation("eager")  # with others transformers leaves the cap of the scores out
        self._window = getattr(config, "sliding_window", None)
        self._layer_types = set(getattr(config, "layer_types", None) or ())
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])

        probe: Any = DynamicCache()
        try:
            tokens = torch.zeros(1, ROWS, dtype=torch.int64, device=device)
            model(input_ids=tokens, past_key_values=probe, use_cache=True)
        except (TypeError, ValueError, AttributeError) as error:
            raise NotBuiltError(f"{name} takes no cache of keys and values ({error}): use the vLLM engine") from error
        layers = probe.layers
        is_plain = all(type(layer) is DynamicLayer and layer.keys is not None for layer in layers)
        shapes = {(tuple(layer.keys.shape), tuple(layer.values.shape)) for layer in layers if is_plain}
        if len(shapes) != 1:
            raise NotBuiltError(
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
        )
        self._slot_layers = [_SlotLayer(self.cache, index) for index in range(len(layers))]
        self._check_against_forward(device)

    def _check_against_forward(self, device: torch.device) -> None:
        """One token decoded must equal the whole forward: not every model reads masks and positions as most do."""
        tokens = torch.arange(2 * ROWS, device=device)[None] % self.vocab_size
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
            raise NotBuiltError(f"{name} cannot be run slot by slot ({error}): use the vLLM engine") from error
        difference = float((got - expected).abs().max())
        allowed = (1e-3 if self.cache.keys.dtype == torch.float32 else 5e-2) * float(expected.abs().max())
        if not difference <= allowed:
            raise NotBuiltError(
                f"{name} gives other logits slot by slot than in one forward (by {difference:.2g}, at most"
                f" {allowed:.2g} is rounding): use the vLLM engine"
            )

    def _eager_logits(self, tokens: Tensor) -> Tensor:
        """Compute logits by attention that has everything: transformers leaves caps and sinks out of faster ones."""
        used = self._model.config.get_text_config()._attn_implementation
        self._model.set_attn_implementation("eager")
        try:
            logits: Tensor = self._model(input_ids=tokens, use_cache=False).logits
        finally:
            self._model.set_attn_implementation(used)
        return logits

    def _masks(self, positions: Tensor, num_keys: int) -> Tensor | dict[str, Tensor]:
        dtype = self.cache.keys.dtype
        full = causal_bias(positions, num_keys, dtype)
        if self._window is None or self._layer_types == {"full_attention"}:
            return full
        sliding = causal_bias(positions, num_keys, dtype, self._window)
        if not self._layer_types:
            return sliding
        return {"full_attention": full, "sliding_attention": sliding}

    def step_shape(self, num_rows: int, num_keys: int) -> tuple[int, int]:
        return padded(num_rows), padded(num_keys)

    def release(self) -> None:
        pass

    def decode(self, tokens: Tensor, positions: Tensor, num_keys: int) -> Tensor:
        at = self.cache.rows_at(positions)
        for layer in self._slot_layers:
            layer.at, layer.num_keys = at, num_keys
        output: Any = self._model(
            input_ids=tokens[:, None],
            position_ids=positions[:, None],
            attention_mask=self._masks(positions, num_keys),
            past_key_values=Cache(layers=list(self._slot_layers)),
            use_cache=True,
        )
        logits: Tensor = output.logits[:, -1]
        return logits.float()

    def prefill(self, tokens: Tensor, lengths: Sequence[int]) -> list[Prefix]:
        cache: Any = DynamicCache()
        self._model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return _prefixes([layer.keys for layer in cache.layers], [layer.values for layer in cache.layers], lengths)

    def hidden(self, tokens: Tensor) -> Tensor:
        # Logits already: what stands between the last layer and them differs from model to model.
        logits: Tensor = self._model(input_ids=tokens, use_cache=False).logits
        return logits

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


@torch.no_grad()
def slot_model(
    model: nn.Module,
    num_slots: int,
    max_length: int,
    device: torch.device,
    own_layers: bool,
    fp32_head: bool = True,
) -> SlotModel:
    """The fast implementation if it fits the model and `own_layers` allows it."""
    if own_layers and is_llama_like(model, max_length):
        return LlamaSlots(model, num_slots, max_length, device, fp32_head)
    return AnySlots(model, num_slots, max_length, device, fp32_head)
