"""The experts that tokens take in a mixture: recorded where they are sampled, replayed where they are learned.

Engine and trainer round differently, so routers that are close to a tie send a token to other experts in one than in
the other, and its log-probs differ by more than rounding. Replay makes the trainer take the engine's experts (Ma et
al., "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", 2025): their weights are
computed from the trainer's own router logits s, so that routers learn,

    w_i = exp(s_i) / Σ_{j in chosen} exp(s_j)         or, where a family does not normalise, / Σ_j exp(s_j)

Ids are stored as [num_tokens, layers * experts per token], `UNKNOWN` where the engine recorded none: there the router
chooses for itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._dynamo import maybe_mark_dynamic

from hotseat.errors import UnsupportedError

# The model types whose routers return logits, weights and ids, and choose by a softmax; whether they normalise.
_NORMALISES: Mapping[str, Callable[[Any], bool]] = {
    "mixtral": lambda config: True,
    "olmoe": lambda config: bool(config.norm_topk_prob),
    "qwen2_moe": lambda config: bool(config.norm_topk_prob),
    "qwen3_moe": lambda config: bool(config.norm_topk_prob),
}
_ROUTER = re.compile(r"\.layers\.(\d+)\.mlp\.gate$")


def check_replay(model_config: Any) -> None:
    """Raise unless the routing of models of this config can be recorded and replayed."""
    text = model_config.get_text_config()
    if text.model_type not in _NORMALISES:
        name = type(model_config).__name__.removesuffix("Config")
        raise UnsupportedError(
            f"rollout.routing_replay is set, and {name} is none of the mixtures of experts whose routing is replayed,"
            f" which are {', '.join(_NORMALISES)}: unset it, or choose such a model"
        )


@dataclass(frozen=True)
class RoutingShape:
    """Numbers that give the size of a token's routing."""

    num_layers: int  # with those that have no experts, whose ids are unknown
    num_chosen: int  # experts of a token in a layer
    num_experts: int

    @classmethod
    def of(cls, model_config: Any) -> RoutingShape:
        text = model_config.get_text_config()
        num_experts = getattr(text, "num_local_experts", None) or text.num_experts
        return cls(text.num_hidden_layers, text.num_experts_per_tok, num_experts)

    @property
    def width(self) -> int:
        """Return the ids of a token."""
        return self.num_layers * self.num_chosen

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the smallest type of ids that has room for one more, `unknown`."""
        return np.dtype(np.uint8 if self.num_experts < 256 else np.int16)

    @property
    def bytes_per_token(self) -> int:
        return self.width * self.dtype.itemsize


def unknown_routing(num_tokens: int, like: np.ndarray[Any, Any] | Tensor) -> Any:
    """Return the routing of tokens of which none is known, of the type and width of another: [num_tokens, width]."""
    if isinstance(like, np.ndarray):
        return np.full((num_tokens, like.shape[1]), np.iinfo(like.dtype).max, like.dtype)
    return torch.full((num_tokens, like.shape[1]), torch.iinfo(like.dtype).max, dtype=like.dtype, device=like.device)


class GrowingRouting:
    """The routing of a segment that grows turn by turn."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray[Any, Any]] = []  # of the first tokens, one after another

    def add(self, routing: np.ndarray[Any, Any] | None, num_tokens: int) -> None:
        """Add what a turn recorded of a segment that has `num_tokens` tokens with it.

        Tokens of earlier turns keep the experts with which what follows them was sampled.
        """
        if routing is not None:
            self._parts.append(routing[sum(map(len, self._parts)) : num_tokens - 1])

    def of(self, num_tokens: int) -> Tensor | None:
        """Return the routing of the first tokens, unknown where none was recorded; None if none was at all."""
        if not self._parts:
            return None
        known = np.concatenate(self._parts)[:num_tokens]
        return torch.from_numpy(np.concatenate([known, unknown_routing(num_tokens - len(known), known)]))


def routers(model: nn.Module) -> dict[int, Any]:
    """Return the routers of a model by the number of their layer."""
    named = ((_ROUTER.search(name), module) for name, module in model.named_modules())
    return {int(match[1]): module for match, module in named if match is not None and hasattr(module, "top_k")}


class RoutingRecorder:
    """Records the experts that a model of transformers chooses, forward by forward."""

    def __init__(self, model: Any):
        self._shape = RoutingShape.of(model.config)
        self._chosen: dict[int, Tensor] = {}  # in the last forward, by layer
        for layer, router in routers(model).items():
            router.register_forward_hook(self._keep_of(layer))

    def last(self) -> Tensor:
        """Return the routing of the last forward: [rows, width], rows as they were in the model's input."""
        shape, dtype = self._shape, torch.from_numpy(np.empty(0, self._shape.dtype)).dtype
        any_chosen = next(iter(self._chosen.values()))
        none = torch.full_like(any_chosen, torch.iinfo(dtype).max)
        return torch.cat([self._chosen.get(layer, none) for layer in range(shape.num_layers)], dim=1).to(dtype)

    def _keep_of(self, layer: int) -> Callable[[nn.Module, Any, Any], None]:
        def keep(router: nn.Module, arguments: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            self._chosen[layer] = output[2]

        return keep


ROUTING = "hotseat_routing"  # the keyword argument that carries ids from the model's forward to its layers


def replay_routing(model: Any, layers: Mapping[int, nn.Module]) -> None:
    """Let routers take the experts that the model's forward is given as `ROUTING`, [rows, width], where it is given.

    layers: those around the routers. They get the argument anew when activations are recomputed.
    """
    shape = RoutingShape.of(model.config)
    text = model.config.get_text_config()
    normalises = _NORMALISES[text.model_type](text)
    own = routers(model)
    assert own, f"no routers are known in a model of type {text.model_type}"
    for layer, router in own.items():
        router.replayed = None
        layers[layer].register_forward_pre_hook(_give(router, layer, shape), with_kwargs=True)
        router.register_forward_hook(_Replay(shape, normalises))


def _give(router: Any, layer: int, shape: RoutingShape) -> Callable[[nn.Module, Any, dict[str, Any]], None]:
    columns = slice(layer * shape.num_chosen, (layer + 1) * shape.num_chosen)

    def give(_: nn.Module, arguments: Any, named: dict[str, Any]) -> None:
        ids = named.get(ROUTING)
        router.replayed = None if ids is None else ids[:, columns]
        if ids is not None:
            maybe_mark_dynamic(router.replayed, 0)  # else each number of rows would compile a layer anew

    return give


class _Replay:
    """A hook of a router: it replaces the experts chosen, and computes their weights from the router's logits."""

    def __init__(self, shape: RoutingShape, normalises: bool):
        self._num_experts, self._normalises = shape.num_experts, normalises

    def __call__(
        self, router: Any, arguments: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, chosen = output
        if router.replayed is None:
            return output
        recorded = router.replayed.to(chosen.dtype)
        ids = torch.where(recorded < self._num_experts, recorded, chosen)
        replayed = chosen_weights(logits, ids, self._normalises)
        return logits, replayed.to(weights.dtype), ids


def chosen_weights(logits: Tensor, ids: Tensor, normalises: bool) -> Tensor:
    """Compute the weights of chosen experts from router logits: [rows, experts], [rows, k] -> [rows, k] float32."""
    weights = logits.float().softmax(-1).gather(-1, ids)
    return weights / weights.sum(-1, keepdim=True) if normalises else weights
