"""Shapes of decoder-only transformers: the sizes that memory depends on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from hotseat.errors import PlacementError

Head = Literal["lm", "scalar"]


@dataclass(frozen=True, slots=True)
class VisionShape:
    """Sizes of a visual encoder: a transformer over patches of images, and what brings its result to the decoder."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    linears: tuple[tuple[int, int], ...]  # inputs and outputs of the linear layers behind the encoder
    num_other_parameters: int  # outside the layers and `linears`: embeddings of patches and positions, norms
    patch_values: int  # numbers in the pixels of a patch
    patches_per_token: int  # patches that become one token of the decoder
    is_gated: bool = False  # gated MLPs and RMSNorm (Qwen2.5-VL); else plain MLPs and LayerNorm
    has_fused_qkv: bool = False  # one linear layer for q, k and v
    tokens_per_image: int | None = None  # where images of every size become as many

    @property
    def num_parameters(self) -> int:
        h, m = self.hidden_size, self.intermediate_size
        mlp = 3 * h * m + 2 * m + h if self.is_gated else 2 * h * m + m + h
        norms = 2 * h if self.is_gated else 4 * h
        behind = sum(inputs * outputs for inputs, outputs in self.linears)
        return self.num_layers * (4 * h * h + 4 * h + mlp + norms) + behind + self.num_other_parameters

    def num_adapter_parameters(self, rank: int) -> int:
        """Count the parameters of low-rank adapters on every linear layer."""
        h, m = self.hidden_size, self.intermediate_size
        attention = 6 * h if self.has_fused_qkv else 8 * h
        layer = attention + (3 if self.is_gated else 2) * (h + m)
        return rank * (self.num_layers * layer + sum(inputs + outputs for inputs, outputs in self.linears))


@dataclass(frozen=True, slots=True)
class LinearShape:
    """Sizes of linear attention (the gated delta rule), which some layers have in place of attention."""

    num_layers: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int  # of a head
    value_dim: int
    kernel: int  # tokens that the convolution sees

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Queries, keys and values of a token, which are convolved."""
        return 2 * self.num_key_heads * self.key_dim + self.value_size

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one sequence in all layers: fp32, and at most 4 bytes for what is convolved."""
        state = self.num_value_heads * self.key_dim * self.value_dim
        return self.num_layers * 4 * (state + (self.kernel - 1) * self.channels)

    def outputs(self) -> tuple[int, ...]:
        """Return the outputs of the linear layers that read hidden states."""
        return (self.channels, self.value_size, self.num_value_heads, self.num_value_heads)

    def num_matrix_parameters(self, hidden_size: int) -> int:
        """Count the parameters of the matrices of one layer outside its MLP."""
        return hidden_size * (sum(self.outputs()) + self.value_size)

    def num_parameters(self, hidden_size: int) -> int:
        """Count the parameters of one layer outside its MLP, with its norms."""
        other = self.kernel * self.channels + 2 * self.num_value_heads + self.value_dim + 2 * hidden_size
        return self.num_matrix_parameters(hidden_size) + other

    def num_adapter_inputs(self, hidden_size: int) -> int:
        """Add up inputs and outputs of the linear layers of one layer outside its MLP."""
        return sum(hidden_size + out for out in self.outputs()) + self.value_size + hidden_size


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Sizes of latent attention (DeepSeek-V2 and V3): one latent vector per token, of which all heads make theirs."""

    num_heads: int
    q_rank: int  # 0: queries are made of the hidden state itself
    kv_rank: int
    nope_dim: int  # of a head's queries and keys, without positions
    rope_dim: int  # with positions; its keys are those of all heads
    value_dim: int

    @property
    def cached_size(self) -> int:
        """Values of a token in the cache of one layer, on every tensor-parallel rank."""
        return self.kv_rank + self.rope_dim

    @property
    def q_size(self) -> int:
        return self.num_heads * (self.nope_dim + self.rope_dim)

    @property
    def value_size(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def made_size(self) -> int:
        """Values of a token that are made of its latent ones: keys without positions, and values."""
        return self.num_heads * (self.nope_dim + self.value_dim)

    def matrices(self, hidden_size: int) -> tuple[tuple[int, int], ...]:
        """Return inputs and outputs of the linear layers."""
        queries = ((hidden_size, self.q_rank), (self.q_rank, self.q_size)) if self.q_rank else ()
        return (
            *(queries or ((hidden_size, self.q_size),)),
            (hidden_size, self.cached_size),
            (self.kv_rank, self.made_size),
            (self.value_size, hidden_size),
        )


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a Llama-like model: RMSNorm, rotary positions, grouped-query attention, gated MLPs or experts.

    Some of its layers may have linear attention, or all of them latent attention.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_embeddings: bool = False
    attention_bias: bool = False  # on q, k and v (Qwen2)
    output_bias: bool = False  # on the attention's output projection too (Llama with attention_bias)
    qk_norm: bool = False  # a norm over each head of q and k (Qwen3)
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0  # of one expert; 0: intermediate_size
    shared_expert_size: int = 0  # intermediate size of the expert that every token takes
    shared_expert_gate: bool = False
    num_dense_layers: int = 0  # of a mixture: layers with a plain MLP
    head: Head = "lm"  # scalar: a value or reward model
    vision: VisionShape | None = None  # of a vision-language model
    has_gated_attention: bool = False  # what attention gives is gated: a second output for each query (Qwen3.5)
    linear: LinearShape | None = None
    latent: LatentShape | None = None

    @property
    def num_linear_layers(self) -> int:
        """Layers without a KV cache."""
        return 0 if self.linear is None else self.linear.num_layers

    @property
    def num_vision_parameters(self) -> int:
        return 0 if self.vision is None else self.vision.num_parameters

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def expert_size(self) -> int:
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def num_embedding_parameters(self) -> int:
        """Parameters outside the layers: embedding, output head and last norm."""
        embedding = self.vocab_size * self.hidden_size
        head = self.hidden_size if self.head == "scalar" else 0 if self.tie_embeddings else embedding
        return embedding + head + self.hidden_size

    @property
    def num_attention_parameters(self) -> int:
        """Parameters of one layer with attention outside its MLP: q, k, v, output, their biases, the norms."""
        h = self.hidden_size
        if self.latent is not None:
            biased = (self.latent.q_rank + self.latent.cached_size) * self.attention_bias
            norms = 2 * h + self.latent.q_rank + self.latent.kv_rank
            return self._num_attention_matrices + biased + h * self.output_bias + norms
        bias = (self.q_size + 2 * self.kv_size) * self.attention_bias + h * self.output_bias
        norms = 2 * h + 2 * self.head_dim * self.qk_norm
        return self._num_attention_matrices + bias + norms

    @property
    def _num_attention_matrices(self) -> int:
        if self.latent is not None:
            return sum(inputs * outputs for inputs, outputs in self.latent.matrices(self.hidden_size))
        return self.hidden_size * ((2 + self.has_gated_attention) * self.q_size + 2 * self.kv_size)

    @property
    def _num_more_of_linear(self) -> int:
        """Parameters that a layer with linear attention has more than another one, or fewer."""
        return (
            0 if self.linear is None else self.linear.num_parameters(self.hidden_size) - self.num_attention_parameters
        )

    @property
    def num_largest_layer_parameters(self) -> int:
        return self.num_layer_parameters + max(0, self._num_more_of_linear)

    @property
    def num_dense_layer_parameters(self) -> int:
        return self.num_attention_parameters + 3 * self.hidden_size * self.intermediate_size

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of one layer with attention; in a mixture, with all its experts."""
        if not self.num_experts:
            return self.num_dense_layer_parameters
        h = self.hidden_size
        experts = self.num_experts * 3 * h * self.expert_size + h * self.num_experts
        shared = 3 * h * self.shared_expert_size + h * self.shared_expert_gate
        return self.num_attention_parameters + experts + shared

    @property
    def num_parameters(self) -> int:
        layers = (self.num_layers - self.num_dense_layers) * self.num_layer_parameters
        layers += self.num_dense_layers * self.num_dense_layer_parameters
        layers += self.num_linear_layers * self._num_more_of_linear
        return self.num_embedding_parameters + layers + self.num_vision_parameters

    @property
    def num_matrix_parameters(self) -> int:
        """Parameters of the matrices inside the layers. The experts of a mixture are stacked and count as none."""
        h = self.hidden_size
        attention = (self.num_layers - self.num_linear_layers) * self._num_attention_matrices
        if self.linear is not None:
            attention += self.linear.num_layers * self.linear.num_matrix_parameters(h)
        num_plain = self.num_dense_layers if self.num_experts else self.num_layers
        mixture = h * self.num_experts + 3 * h * self.shared_expert_size + h * self.shared_expert_gate
        mlps = num_plain * 3 * h * self.intermediate_size + (self.num_layers - num_plain) * mixture
        return attention + mlps

    @property
    def num_largest_matrix(self) -> int:
        """Parameters of the largest matrix inside the layers that is not of experts."""
        if self.latent is not None:
            of_attention = max(inputs * outputs for inputs, outputs in self.latent.matrices(self.hidden_size))
            return max(of_attention, self.hidden_size * self.intermediate_size)
        channels = 0 if self.linear is None else self.linear.channels
        return self.hidden_size * max((1 + self.has_gated_attention) * self.q_size, channels, self.intermediate_size)

    def num_adapter_parameters(self, rank: int) -> int:
        """Count the parameters of low-rank adapters on every linear layer: rank x (in + out) each.

        A scalar head is trained whole and counted too. The experts of a mixture are not linear layers in transformers,
        so they get no adapters.
        """
        h = self.hidden_size
        attention = 4 * h + (2 + self.has_gated_attention) * self.q_size + 2 * self.kv_size
        if self.latent is not None:
            attention = sum(inputs + outputs for inputs, outputs in self.latent.matrices(h))
        attention *= self.num_layers - self.num_linear_layers
        if self.linear is not None:
            attention += self.linear.num_layers * self.linear.num_adapter_inputs(h)
        num_plain = self.num_dense_layers if self.num_experts else self.num_layers
        mlps = num_plain * 3 * (h + self.intermediate_size)
        if self.shared_expert_size:
            mlps += (self.num_layers - num_plain) * 3 * (h + self.shared_expert_size)
        encoder = 0 if self.vision is None else self.vision.num_adapter_parameters(rank)
        return rank * (attention + mlps) + encoder + (h if self.head == "scalar" else 0)

    @property
    def mixed_width(self) -> int:
        """Values of one token that attention mixes: its queries, keys and values."""
        if self.latent is not None:
            return 2 * self.latent.q_size + self.latent.value_size
        return (1 + self.has_gated_attention) * self.q_size + 2 * self.kv_size

    @property
    def mlp_width(self) -> int:
        """Intermediate values of one token in a layer; in a mixture, of the experts that the token takes."""
        if not self.num_experts:
            return self.intermediate_size
        return self.experts_per_token * self.expert_size + self.shared_expert_size

    def with_scalar_head(self) -> ModelShape:
        return replace(self, head="scalar")


_LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2")  # kinds of models whose latent attention is described
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
_REQUIRED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


def from_hf_config(config: Mapping[str, object]) -> ModelShape:
    """Read the shape from a Hugging Face config.json of a Llama-, Qwen-, Mistral- or Mixtral-like model.

    Of vision-language models, those of Qwen2.5-VL, Qwen3-VL, Idefics3, SmolVLM and LLaVA are described; Qwen3.5's are
    loaded for text alone.
    """
    if config.get("model_type") == "qwen3_5":
        config = {key: value for key, value in _language_config(config).items() if key != "vision_config"}
    whole = config
    vision = config.get("vision_config")
    if isinstance(vision, Mapping) and config.get("model_type") in _ENCODERS:
        config = _language_config(config)
    missing = [key for key in _REQUIRED if _whole(config, key, 0) < 1]
    if missing:
        hint = " (it is in text_config)" if isinstance(config.get("text_config"), Mapping) else ""
        raise PlacementError(
            f"model config lacks {', '.join(missing)}{hint}: memory can be estimated for decoders with these keys:"
            f" {', '.join(_REQUIRED)}"
        )
    if config.get("kv_lora_rank") and config.get("model_type") not in _LATENT:
        raise PlacementError(
            f"model config has kv_lora_rank and is of {config.get('model_type')}: the latent attention of"
            f" {', '.join(_LATENT)} is described here; without a shape, memory is not checked"
        )
    layer_types = config.get("layer_types")
    is_qwen3_5 = config.get("model_type") in ("qwen3_5", "qwen3_5_text")
    described = {"full_attention", "sliding_attention", *(["linear_attention"] if is_qwen3_5 else [])}
    if isinstance(layer_types, list) and not set(layer_types) <= described:
        kinds = ", ".join(sorted(set(map(str, layer_types)) - described))
        raise PlacementError(
            f"model config has layer_types {kinds}: such layers are not described here; without a shape, memory is not"
            " checked"
        )
    family = str(config.get("model_type", ""))
    num_heads = _whole(config, "num_attention_heads", 0)
    hidden_size = _whole(config, "hidden_size", 0)
    num_layers = _whole(config, "num_hidden_layers", 0)
    num_experts = next((n for key in _EXPERT_KEYS if (n := _whole(config, key, 0))), 0)
    expert_size = _whole(config, "moe_intermediate_size", 0) if num_experts else 0
    shared_size = _whole(config, "shared_expert_intermediate_size", 0) if num_experts else 0
    has_bias = bool(config.get("attention_bias", config.get("qkv_bias", False)))
    is_qwen2 = family.startswith("qwen2")
    architectures = config.get("architectures")
    named = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    return ModelShape(
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=_whole(config, "intermediate_size", 0),
        num_heads=num_heads,
        num_kv_heads=_whole(config, "num_key_value_heads", num_heads),
        head_dim=_whole(config, "head_dim", hidden_size // num_heads),
        vocab_size=_whole(config, "vocab_size", 0),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=has_bias or is_qwen2,
        output_bias=has_bias and not is_qwen2,
        qk_norm=family.startswith("qwen3"),
        num_experts=num_experts,
        experts_per_token=_whole(config, "num_experts_per_tok", 0) if num_experts else 0,
        moe_intermediate_size=expert_size,
        shared_expert_size=shared_size or _whole(config, "n_shared_experts", 0) * expert_size,
        shared_expert_gate=bool(shared_size),
        num_dense_layers=_num_dense_layers(config, num_layers) if num_experts else 0,
        head="scalar" if "SequenceClassification" in named or "Reward" in named else "lm",
        vision=_vision_shape(whole, vision, hidden_size) if isinstance(vision, Mapping) else None,
        has_gated_attention=is_qwen3_5,
        linear=_linear_shape(config, num_layers) if is_qwen3_5 else None,
        latent=_latent_shape(config, num_heads) if config.get("kv_lora_rank") else None,
    )


def _latent_shape(config: Mapping[str, object], num_heads: int) -> LatentShape:
    """Read the shape of latent attention. Keys that are missing have the values of transformers."""
    return LatentShape(
        num_heads,
        q_rank=_whole(config, "q_lora_rank", 0 if "q_lora_rank" in config else 1536),
        kv_rank=_whole(config, "kv_lora_rank", 0),
        nope_dim=_whole(config, "qk_nope_head_dim", 128),
        rope_dim=_whole(config, "qk_rope_head_dim", 64),
        value_dim=_whole(config, "v_head_dim", 128),
    )


def _linear_shape(config: Mapping[str, object], num_layers: int) -> LinearShape:
    """Read the shape of linear attention. Keys that are missing have the values of transformers."""
    layer_types = config.get("layer_types")
    if isinstance(layer_types, list):
        count = layer_types.count("linear_attention")
    else:
        count = num_layers - num_layers // max(1, _whole(config, "full_attention_interval", 4))
    return LinearShape(
        count,
        num_key_heads=_whole(config, "linear_num_key_heads", 16),
        num_value_heads=_whole(config, "linear_num_value_heads", 32),
        key_dim=_whole(config, "linear_key_head_dim", 128),
        value_dim=_whole(config, "linear_value_head_dim", 128),
        kernel=_whole(config, "linear_conv_kernel_dim", 4),
    )


# Defaults of the visual encoders of transformers, for keys that a config.json may leave out.
_ENCODERS: dict[str, dict[str, int]] = {
    "qwen2_5_vl": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "patch_size": 14},
    "qwen3_vl": {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16},
    "idefics3": {"num_hidden_layers": 12, "hidden_size": 1152, "intermediate_size": 3072, "patch_size": 32},
    "smolvlm": {"num_hidden_layers": 12, "hidden_size": 1152, "intermediate_size": 3072, "patch_size": 32},
    "llava": {"num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 4096, "patch_size": 14},
}
_POSITIONS = 2304  # of Qwen3-VL's encoder
_DEEPSTACK = 3  # layers of Qwen3-VL's encoder that reach layers of the decoder


def _language_config(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the config of the decoder of a vision-language model; hubs also have files with all keys in one object.

    The whole model's config says whether its embeddings are tied.
    """
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return config
    common = {key: config[key] for key in ("tie_word_embeddings", "architectures") if key in config}
    return {**text, **common}


def _vision_shape(config: Mapping[str, object], vision: Mapping[str, object], decoder_size: int) -> VisionShape:
    """Read the shape of the visual encoder, and of what brings its result to a decoder of this size."""
    family = str(config.get("model_type", ""))
    if family not in _ENCODERS:
        raise PlacementError(
            f"model config has a vision_config of {family}: the visual encoders of {', '.join(_ENCODERS)} are described"
            " here; without a shape, memory is not checked"
        )

    def size(key: str, otherwise: int = 0) -> int:
        return _whole(vision, key, _ENCODERS[family].get(key, otherwise))

    h, m, patch = size("hidden_size"), size("intermediate_size"), size("patch_size")
    num_channels = size("in_channels", 3)
    if family.startswith("qwen"):
        merged = size("spatial_merge_size", 2) ** 2
        out = size("out_hidden_size", decoder_size)
        values = num_channels * size("temporal_patch_size", 2) * patch**2
        linears = [(merged * h, merged * h), (merged * h, out)]
        other = values * h + h + merged * h + out  # patches; the merger's norm and biases
        if family == "qwen3_vl":
            named = vision.get("deepstack_visual_indexes")
            num_deep = len(named) if isinstance(named, list) else _DEEPSTACK
            linears += num_deep * linears
            other += h + h + size("num_position_embeddings", _POSITIONS) * h
            other += num_deep * (2 * merged * h + merged * h + out)
        return VisionShape(
            size("depth"), h, m, tuple(linears), other, values, merged, family == "qwen2_5_vl", has_fused_qkv=True
        )
    num_patches = (size("image_size", 336 if family == "llava" else 224) // patch) ** 2
    values = 3 * patch**2
    layers = size("num_hidden_layers")
    if family == "llava":
        # CLIP: a token for the class, norms before and after; then two linear layers.
        other = values * h + h + (num_patches + 1) * h + 4 * h + 2 * decoder_size
        linears = [(h, decoder_size), (decoder_size, decoder_size)]
        return VisionShape(layers, h, m, tuple(linears), other, values, 1, tokens_per_image=num_patches)
    merged = _whole(config, "scale_factor", 2) ** 2
    other = values * h + h + num_patches * h + 2 * h
    return VisionShape(layers, h, m, ((merged * h, decoder_size),), other, values, merged)


def _whole(config: Mapping[str, object], key: str, otherwise: int) -> int:
    value = config.get(key)
    return value if isinstance(value, int) else otherwise


def _num_dense_layers(config: Mapping[str, object], num_layers: int) -> int:
    """Count the layers of a mixture with a plain MLP: the first ones of DeepSeek's, and those that Qwen's config names.

    Qwen's are in mlp_only_layers, or skipped by decoder_sparse_step.
    """
    if "first_k_dense_replace" in config:
        return min(num_layers, _whole(config, "first_k_dense_replace", 0))
    named = config.get("mlp_only_layers")
    plain = [layer for layer in named if isinstance(layer, int)] if isinstance(named, list) else []
    step = max(1, _whole(config, "decoder_sparse_step", 1))
    return sum(layer in plain or (layer + 1) % step != 0 for layer in range(num_layers))


_qwen2 = partial(ModelShape, attention_bias=True)
_qwen3 = partial(ModelShape, qk_norm=True)


def _qwen2_5_vl(shape: ModelShape) -> ModelShape:
    return replace(shape, vision=_vision_shape({"model_type": "qwen2_5_vl"}, {}, shape.hidden_size))


# layers, hidden size, MLP size, heads, key-value heads, head size, vocabulary
KNOWN_SHAPES: dict[str, ModelShape] = {
    name: shape
    for names, shape in (
        ("CodeLlama-7B", ModelShape(32, 4096, 11008, 32, 32, 128, 32016)),
        ("CodeLlama-13B", ModelShape(40, 5120, 13824, 40, 40, 128, 32016)),
        ("CodeLlama-34B", ModelShape(48, 8192, 22016, 64, 8, 128, 32000)),
        ("DeepSeek-Math-7B", ModelShape(30, 4096, 11008, 32, 32, 128, 102400)),
        ("DeepSeek-R1-Distill-Llama-8B Llama-3-8B Llama-3.1-8B", ModelShape(32, 4096, 14336, 32, 8, 128, 128256)),
        (
            "DeepSeek-R1-Distill-Llama-70B Llama-3-70B Llama-3.1-70B Llama-3.3-70B",
            ModelShape(80, 8192, 28672, 64, 8, 128, 128256),
        ),
        ("DeepSeek-R1-Distill-Qwen-1.5B", _qwen2(28, 1536, 8960, 12, 2, 128, 151936)),
        ("DeepSeek-R1-Distill-Qwen-7B Qwen2-7B Qwen2.5-7B", _qwen2(28, 3584, 18944, 28, 4, 128, 152064)),
        ("DeepSeek-R1-Distill-Qwen-14B Qwen2.5-14B", _qwen2(48, 5120, 13824, 40, 8, 128, 152064)),
        ("DeepSeek-R1-Distill-Qwen-32B Qwen2.5-32B", _qwen2(64, 5120, 27648, 40, 8, 128, 152064)),
        ("Llama-2-7B", ModelShape(32, 4096, 11008, 32, 32, 128, 32000)),
        ("Llama-2-13B", ModelShape(40, 5120, 13824, 40, 40, 128, 32000)),
        ("Llama-2-70B", ModelShape(80, 8192, 28672, 64, 8, 128, 32000)),
        ("Llama-3.1-405B", ModelShape(126, 16384, 53248, 128, 8, 128, 128256)),
        ("Llama-3.2-1B", ModelShape(16, 2048, 8192, 32, 8, 64, 128256, tie_embeddings=True)),
        ("Llama-3.2-3B", ModelShape(28, 3072, 8192, 24, 8, 128, 128256, tie_embeddings=True)),
        ("Mistral-7B", ModelShape(32, 4096, 14336, 32, 8, 128, 32000)),
        ("Mixtral-8x7B", replace(ModelShape(32, 4096, 14336, 32, 8, 128, 32000), num_experts=8, experts_per_token=2)),
        ("Qwen2-0.5B Qwen2.5-0.5B", _qwen2(24, 896, 4864, 14, 2, 64, 151936, tie_embeddings=True)),
        ("Qwen2-1.5B Qwen2.5-1.5B", _qwen2(28, 1536, 8960, 12, 2, 128, 151936, tie_embeddings=True)),
        ("Qwen2-72B Qwen2.5-72B", _qwen2(80, 8192, 29568, 64, 8, 128, 152064)),
        ("Qwen2.5-3B", _qwen2(36, 2048, 11008, 16, 2, 128, 151936, tie_embeddings=True)),
        ("Qwen2.5-VL-3B", _qwen2_5_vl(_qwen2(36, 2048, 11008, 16, 2, 128, 151936, tie_embeddings=True))),
        ("Qwen2.5-VL-7B", _qwen2_5_vl(_qwen2(28, 3584, 18944, 28, 4, 128, 152064))),
        ("Qwen3-0.6B", _qwen3(28, 1024, 3072, 16, 8, 128, 151936, tie_embeddings=True)),
        ("Qwen3-1.7B", _qwen3(28, 2048, 6144, 16, 8, 128, 151936, tie_embeddings=True)),
        ("Qwen3-4B", _qwen3(36, 2560, 9728, 32, 8, 128, 151936, tie_embeddings=True)),
        ("Qwen3-8B", _qwen3(36, 4096, 12288, 32, 8, 128, 151936)),
        ("Qwen3-14B", _qwen3(40, 5120, 17408, 40, 8, 128, 151936)),
        ("Qwen3-32B", _qwen3(64, 5120, 25600, 64, 8, 128, 151936)),
        (
            "Qwen3-30B-A3B",
            replace(
                _qwen3(48, 2048, 6144, 32, 4, 128, 151936),
                num_experts=128,
                experts_per_token=8,
                moe_intermediate_size=768,
            ),
        ),
        ("SmolLM2-135M", ModelShape(30, 576, 1536, 9, 3, 64, 49152, tie_embeddings=True)),
        ("SmolLM2-360M", ModelShape(32, 960, 2560, 15, 5, 64, 49152, tie_embeddings=True)),
        ("SmolLM2-1.7B", ModelShape(24, 2048, 8192, 32, 32, 64, 49152, tie_embeddings=True)),
        ("TinyLlama-1.1B", ModelShape(22, 2048, 5632, 32, 4, 64, 32000)),
    )
    for name in names.split()
}

_IS_VLM = r"(?<![a-z])vl(?![a-z])"
_OTHER_ARCHITECTURE = r"(?<![a-z])(vla|vision|audio|omni|embedding|moe)(?![a-z])"


def known_shape(name: str) -> tuple[ModelShape, str] | None:
    """Guess a model's shape from its hub-like name, with the public model it is the shape of; None: it fits none.

    `OpenRLHF/Llama-3-8b-sft-mixture` is taken for Llama-3-8B: the last part of the name must contain both family and
    size. The result is an assumption, and plans say so.
    """
    last = re.sub(r"[\s_]+", "-", name.rstrip("/").rpartition("/")[2].lower())
    if re.search(_OTHER_ARCHITECTURE, last):
        return None
    is_vlm = re.search(_IS_VLM, last) is not None
    fitting = [model for model, shape in KNOWN_SHAPES.items() if (shape.vision is not None) == is_vlm]
    matches = [model for model in fitting if _names(model.lower(), last)]
    if not matches:
        return None
    model = max(matches, key=lambda match: (len(match), match))
    return KNOWN_SHAPES[model], model


def _names(model: str, text: str) -> bool:
    """Return whether `text` contains the model's family and, anywhere after it, its size, as separate words."""
    # `llama-3-8b` is `llama-3` of size `8b`; a mixture's `30b-a3b` is one size.
    match = re.fullmatch(r"(mixtral)-(.+)|(.+?)-(\d+(?:\.\d+)?[bm](?:-a\d+b)?)", model)
    assert match is not None
    family, size = (group for group in match.groups() if group is not None)
    pattern = r"(?<![a-z\d.])" + r"-?".join(re.escape(word) for word in re.findall(r"[a-z]+|\d+(?:\.\d+)?", family))
    family_match = re.search(pattern + r"(?!\.?\d)", text)
    if family_match is None:
        return False
    return re.search(r"(?<![\d.a-z])" + re.escape(size) + r"(?![a-z\d])", text[family_match.end() :]) is not None
