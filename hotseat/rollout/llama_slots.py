"""Llama, Mistral, Qwen2 and Qwen3 over slots, computed layer by layer, without the Python overhead of their modules.

LLaVA's language models are among these: its visual encoder runs as it is, and the rest as for text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    LlamaForCausalLM,
    LlamaModel,
    LlavaForConditionalGeneration,
    MistralForCausalLM,
    MistralModel,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen3ForCausalLM,
    Qwen3Model,
)
from transformers.activations import SiLUActivation

from hotseat.algorithms.head import HALVES, project
from hotseat.errors import RunError
from hotseat.placement.memory_terms import SEEN_FORWARD_TOKENS
from hotseat.rollout.any_slots import AnySlots
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
from hotseat.rollout.triton_kernels import triton_kernels

_LLAMA_LIKE = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
_BODIES = (LlamaModel, MistralModel, Qwen2Model, Qwen3Model)
# The angles of these depend on the position alone, not on the length of the sequence.
_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}

_MANY_ROWS = 256  # tokens from which on a forward is a prefill, not a step
# Lengths of prefills on a CUDA device are multiples of this: few different ones, since attention is planned for each.
_LENGTH_MULTIPLE = 8


def _body(model: Any) -> Any:
    """Return the layers of a model, with embedding and norm; None if they are not Llama's."""
    if type(model) in _LLAMA_LIKE:
        return model.model
    if type(model) is LlavaForConditionalGeneration and type(model.model.language_model) in _BODIES:
        return model.model.language_model
    return None


def is_llama_like(model: nn.Module, max_length: int) -> bool:
    """Tell whether `LlamaSlots` computes what the model's own forward does."""
    body = _body(model)
    if body is None:
        return False
    assert isinstance(model, PreTrainedModel)
    config: Any = body.config
    window = getattr(config, "sliding_window", None)
    layer_types = (
        getattr(config, "layer_types", None)
        or ["full_attention" if window is None else "sliding_attention"] * config.num_hidden_layers
    )
    is_full = all(kind == "full_attention" for kind in layer_types) or (window is not None and window >= max_length)
    modules = [model, *body.modules(), *model.lm_head.modules()]
    linears = [m for m in modules if isinstance(m, nn.Linear)]
    num_linears = 7 * config.num_hidden_layers + 1
    is_plain = len(linears) == num_linears and all(type(m) is nn.Linear for m in linears)
    has_hooks = any(m._forward_hooks or m._forward_pre_hooks or hasattr(m, "_hf_hook") for m in modules)
    rope = getattr(config, "rope_parameters", None) or {}
    return is_full and is_plain and not has_hooks and rope.get("rope_type", "default") in _STATIC_ROPE


def _fuse(linears: Sequence[nn.Linear], in_major: bool) -> tuple[Tensor, Tensor | None]:
    """Fuse linears with a common input into one [in, out] weight and one bias; their parameters become views.

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
    # It sums in float32. Rounded as transformers does: to the model's type before the product with the weight.
    return weight * F.rms_norm(x, x.shape[-1:], None, eps)


class _Layer:
    """The parameters of one decoder layer, in the order of use."""

    def __init__(self, layer: Any, in_major: bool):
        attention, mlp = layer.self_attn, layer.mlp
        self.norm_1, self.norm_2 = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self.qkv, self.qkv_bias = _fuse([attention.q_proj, attention.k_proj, attention.v_proj], in_major)
        has_head_norms = hasattr(attention, "q_norm")
        self.q_norm = _Norm(attention.q_norm) if has_head_norms else None
        self.k_norm = _Norm(attention.k_norm) if has_head_norms else None
        # Weight and epsilon of the norm of query heads, and of key heads.
        self.head_norms: tuple[Tensor, float, Tensor, float] | None = None
        if self.q_norm is not None and self.k_norm is not None:
            self.head_norms = (self.q_norm.weight, self.q_norm.eps, self.k_norm.weight, self.k_norm.eps)
        self.out, self.out_bias = _fuse([attention.o_proj], in_major)
        self.gate_up, self.gate_up_bias = _fuse([mlp.gate_proj, mlp.up_proj], in_major)
        self.act = F.silu if isinstance(mlp.act_fn, nn.SiLU | SiLUActivation) else mlp.act_fn
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


class LlamaSlots(SlotModel):
    """Llama-like models over slots, without the Python overhead of their modules.

    Query, key and value projections are one matrix, gate and up another; the module's parameters become views of them,
    so the module, its weights and their digests stay live.
    """

    max_forward_tokens = 4096

    def __init__(self, model: Any, num_slots: int, max_length: int, device: torch.device, fp32_head: bool):
        super().__init__(model)
        body = _body(model)
        config = body.config
        self._num_heads = config.num_attention_heads
        self._num_kv_heads = config.num_key_value_heads
        self._head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._norm = _Norm(body.norm)
        self._embedding = body.embed_tokens.weight
        in_major = device.type == "cpu"
        self._layers = [_Layer(layer, in_major) for layer in body.layers]
        # With tied embeddings this moves the embedding too: it is the same parameter.
        self._head, _ = _fuse([model.lm_head], in_major)
        self._has_fp32_head = fp32_head and self._head.dtype in HALVES

        max_keys = padded(max_length)
        positions = torch.arange(max_keys, device=device)[None]
        cos, sin = body.rotary_emb(self._embedding[:1], positions)  # [1, max_keys, head_dim]
        # rotate_half(x) = [-x2, x1] is a roll by half with the first half of the sine negated.
        sin = torch.cat([-sin[..., : self._head_dim // 2], sin[..., self._head_dim // 2 :]], dim=-1)
        self._table = cos[0].contiguous(), sin[0].contiguous()  # [max_keys, head_dim] each
        self.cache = SlotCache(
            len(self._layers),
            padded(num_slots),
            self._num_kv_heads,
            max_keys,
            (self._head_dim, self._head_dim),
            self._embedding.dtype,
            device,
        )
        # On a CUDA device also operations that read and write less. Their last bits may depend on the rows beside.
        self._graphs = _DecodeGraphs(self._decode) if device.type == "cuda" else None
        # Triton's, where it works: one or two kernels between two matrix products, instead of up to six.
        kernels = triton_kernels(device) if self._graphs is not None else None
        self._kernels: Any = None if kernels is None else kernels.layers

    def _rms_norm(self, x: Tensor, norm: _Norm) -> Tensor:
        if self._kernels is None:
            return _rms_norm(x, norm)
        normed: Tensor = self._kernels.rms_norm(x, norm.weight, norm.eps)
        return normed

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines for `_heads`: [rows, 1, head_dim] each, or [max_keys, head_dim] for kernels."""
        if self._kernels is not None:
            return self._table
        cos, sin = self._table
        return cos[positions][:, None], sin[positions][:, None]

    def _project(self, layer: _Layer, x: Tensor) -> Tensor:
        """Project to queries, keys and values: [rows, hidden] -> [rows, heads + 2 * kv_heads, dim]."""
        qkv = _linear(self._rms_norm(x, layer.norm_1), layer.qkv, layer.qkv_bias)
        return qkv.view(x.shape[0], self._num_heads + 2 * self._num_kv_heads, self._head_dim)

    def _heads(
        self, layer: _Layer, x: Tensor, positions: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project and rotate: [rows, hidden] -> query [rows, heads, dim], key and value [rows, kv_heads, dim]."""
        num_heads, num_kv = self._num_heads, self._num_kv_heads
        qkv = self._project(layer, x)
        qk, value = qkv[:, : num_heads + num_kv], qkv[:, num_heads + num_kv :]
        if self._kernels is not None:
            self._kernels.rotate(qkv, num_heads, positions, angles, layer.head_norms)
            return qk[:, :num_heads], qk[:, num_heads:], value
        if layer.q_norm is not None and layer.k_norm is not None:
            qk = torch.cat([_rms_norm(qk[:, :num_heads], layer.q_norm), _rms_norm(qk[:, num_heads:], layer.k_norm)], 1)
        qk = self._rotate(qk, *angles)
        return qk[:, :num_heads], qk[:, num_heads:], value

    def _rotate(self, qk: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = self._head_dim // 2
        if self._graphs is None:
            return torch.addcmul(qk * cos, qk.roll(half, -1), sin)
        rotated = qk * cos
        rotated[..., :half].addcmul_(qk[..., half:], sin[..., :half])
        rotated[..., half:].addcmul_(qk[..., :half], sin[..., half:])
        return rotated

    def _rest(self, layer: _Layer, x: Tensor, attended: Tensor) -> Tensor:
        """Compute the rest of a layer after attention: [rows, hidden], [rows, heads * dim] -> [rows, hidden]."""
        x = self._add(x, attended, layer.out, layer.out_bias)
        inner = self._rms_norm(x, layer.norm_2)
        if self._kernels is not None and layer.act is F.silu:
            inner = self._kernels.silu_product(_linear(inner, layer.gate_up, layer.gate_up_bias))
            return self._add(x, inner, layer.down, layer.down_bias)
        if self._graphs is not None and len(x) > _MANY_ROWS and layer.gate_up_bias is None:
            # Two products: what follows takes a third of the time on tensors of their own than on halves of one.
            gate, up = (torch.mm(inner, half) for half in layer.gate_up.chunk(2, dim=1))
        else:
            gate, up = _linear(inner, layer.gate_up, layer.gate_up_bias).chunk(2, dim=1)
        return self._add(x, layer.act(gate) * up, layer.down, layer.down_bias)

    def _add(self, x: Tensor, inner: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Add a product to `x`, which nobody uses afterwards."""
        if self._graphs is not None and bias is None:
            return x.addmm_(inner, weight)
        return x + _linear(inner, weight, bias)

    def step_shape(self, num_rows: int, num_keys: int) -> tuple[int, int]:
        if self._graphs is None:
            return super().step_shape(num_rows, num_keys)
        # Few shapes, since each is recorded: powers of two, for many rows one between, for keys three.
        rows, keys = ROWS, 128
        while rows < num_rows:
            rows *= 2
        if rows >= _MANY_ROWS and 3 * rows // 4 >= num_rows:
            rows = 3 * rows // 4
        if self._kernels is not None:  # which read as many keys as there are
            return min(rows, self.cache.num_slots), self.cache.max_keys
        while keys < num_keys:
            keys *= 2
        keys = next(k for k in (5 * keys // 8, 6 * keys // 8, 7 * keys // 8, keys) if k >= num_keys)
        return min(rows, self.cache.num_slots), min(keys, self.cache.max_keys)

    def release(self) -> None:
        if self._graphs is not None:
            self._graphs.clear()

    def decode(self, tokens: Tensor, positions: Tensor, num_keys: int, shifts: Tensor | None = None) -> Tensor:
        assert shifts is None, "positions of images for a model whose images count as other tokens do"
        if self._graphs is None:
            return self._decode(tokens, positions, num_keys)
        return self._graphs.decode(tokens, positions, num_keys)

    def _decode(self, tokens: Tensor, positions: Tensor, num_keys: int) -> Tensor:
        rows = tokens.shape[0]
        x = F.embedding(tokens, self._embedding)
        angles = self._angles(positions)
        if self._kernels is not None:
            for index, layer in enumerate(self._layers):
                cache = self.cache.layers[index]
                qkv = self._project(layer, x)
                self._kernels.rotate(qkv, self._num_heads, positions, angles, layer.head_norms, cache)
                x = self._rest(layer, x, self._kernels.attend(qkv, self._num_heads, positions, cache))
            return self.logits(x)
        bias = causal_bias(positions, num_keys, x.dtype)
        at = self.cache.rows_at(positions)
        for index, layer in enumerate(self._layers):
            keys, values = self.cache.layers[index]
            query, key, value = self._heads(layer, x, positions, angles)
            self.cache.append(index, at, key, value)
            # The query heads of a group share their keys, so they can be computed as several queries of one head.
            attended = F.scaled_dot_product_attention(
                query.reshape(rows, self._num_kv_heads, -1, self._head_dim),
                keys[:rows, :, :num_keys],
                values[:rows, :, :num_keys],
                attn_mask=bias,
            )
            x = self._rest(layer, x, attended.reshape(rows, -1))
        return self.logits(x)

    def _forward(
        self, tokens: Tensor, with_prefix: bool, images: RowsOfImages
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        batch, length = tokens.shape
        x = self._embed(tokens, images)
        positions = torch.arange(length, device=tokens.device).repeat(batch)
        angles = self._angles(positions)
        keys, values = [], []
        for layer in self._layers:
            heads = self._heads(layer, x, positions, angles)
            query, key, value = (h.reshape(batch, length, -1, self._head_dim).transpose(1, 2) for h in heads)
            if with_prefix:
                keys.append(key)
                values.append(value)
                if layer is self._layers[-1]:  # nobody needs what comes after the last keys
                    break
            is_grouped = self._num_heads > self._num_kv_heads
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=is_grouped)
            x = self._rest(layer, x, attended.transpose(1, 2).reshape(batch * length, -1))
        return x, keys, values

    def image_batch(self, length: int, images: Sequence[str], index: int) -> ImageBatch:
        """Contexts whose images have one shape go together, `ROWS` of them on a CPU; all others are alone."""
        assert self._vision is not None, "images, and the model is no VLM"
        shape = self._vision.common_shape(images)
        size = ROWS if self._graphs is None else max(1, SEEN_FORWARD_TOKENS // length)
        if shape is None or (self._graphs is None and length * size > self.max_forward_tokens):
            return 1, (index,)
        return size, (len(images), *shape)

    def prefill(self, tokens: Tensor, lengths: Sequence[int], images: RowsOfImages = ()) -> list[Prefix]:
        if self._graphs is not None:
            tokens = tokens[:, : -(-max(lengths) // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE]
        _, keys, values = self._forward(tokens, True, images)
        return cut_prefixes(keys, values, lengths)

    def hidden(self, tokens: Tensor, lengths: Sequence[int] = (), images: RowsOfImages = ()) -> Tensor:
        tokens = without_last(tokens, lengths, images)
        return self._forward(tokens, False, images)[0].view(*tokens.shape, -1)

    def _embed(self, tokens: Tensor, images: RowsOfImages) -> Tensor:
        """Look tokens up, with what the visual encoder makes of images for placeholders: [batch * length, hidden].

        On a CPU the encoder always gets the images of `ROWS` contexts, where these may have company: its products must
        have as many rows whichever contexts come together.
        """
        x = F.embedding(tokens.flatten(), self._embedding)
        if not any(images):
            return x
        assert self._vision is not None, "images, and the model is no VLM"
        is_image = (tokens.flatten() == self._vision.image_token_id)[:, None]
        num_placeholders = int(is_image.sum())  # before the encoder starts: a CUDA device is waited for here
        seen = [image for row in images for image in row]
        num_images = len(seen)
        if self._graphs is None and self.image_batch(tokens.shape[1], images[0], 0)[0] == ROWS:
            seen += [*images[0]] * (ROWS - len(images))
        features = self._vision.features(seen, tokens.device)
        # Contexts with company have images of one shape, so each image has as many features as any other.
        num_features = len(features) * num_images // len(seen)
        if num_features != num_placeholders:
            raise RunError(f"{num_placeholders} placeholders of images, which have {num_features} features")
        return x.masked_scatter(is_image, features.to(x.dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        hidden = self._rms_norm(hidden, self._norm)
        return project(hidden, self._head.t()) if self._has_fp32_head else torch.mm(hidden, self._head).float()


@torch.no_grad()
def slot_model(
    model: nn.Module,
    num_slots: int,
    max_length: int,
    device: torch.device,
    own_layers: bool,
    fp32_head: bool = True,
) -> SlotModel:
    """Return the fast implementation if it fits the model and `own_layers` allows it, otherwise the general one."""
    if own_layers and is_llama_like(model, max_length):
        return LlamaSlots(model, num_slots, max_length, device, fp32_head)
    return AnySlots(model, num_slots, max_length, device, fp32_head)
