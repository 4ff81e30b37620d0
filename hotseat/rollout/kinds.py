"""Kinds of rollout engines: what a run asks of each before there is an engine, and how one is made."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hotseat.extensions import load
from hotseat.model_source import ModelSource
from hotseat.registry.engines import DEFAULT_ENGINE, ENGINES, EngineEntry, engine_entry
from hotseat.rollout.engine import Engine


@dataclass(frozen=True)
class ImageOptions:
    """Bounds on the images of a request."""

    max_images: int  # of a request
    largest: str  # the prepared image of the most tokens that are replaced: memory is measured with it


@dataclass(frozen=True)
class EngineOptions:
    """Settings that not every engine has; its entry in the registry lists those that it has."""

    tensor_parallel_size: int = 1
    memory_share: float | None = None  # None: the entry's; ignored on a CPU, where the cache is what the slots need
    prefix_caching: bool = False
    enforce_eager: bool = False
    logs: str = ""  # the folder for its log
    cache_gib: float | None = None  # None: as much as the memory share has room for
    engine_args: Mapping[str, Any] = field(default_factory=dict)  # further ones, by the engine's own names
    adapter_rank: int = 0  # of adapters that it gets apart from weights; 0: merged into them, if any
    adapter_targets: tuple[str, ...] | str = ()  # layers that have adapters, as in `train.lora`
    images: ImageOptions | None = None  # None: requests have none
    fp8_weights: bool = False  # of linear layers
    has_nf4: bool = False  # linear layers are in NF4, as the trainer's are, and adapters are beside them
    fp8_cache: bool = False  # the KV cache
    role: str = "rollout"  # names its log
    num_likely: int = 0  # of a teacher: its most likely tokens at each place; its cache is what its slots need


@dataclass(frozen=True)
class EngineSettings:
    """Settings of a rollout engine."""

    model: ModelSource
    max_length: int
    num_slots: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    num_threads: int
    fp32_head: bool = True
    num_kept_prompts: int = ENGINES[DEFAULT_ENGINE].num_kept_prompts
    keeps_cache: bool = True  # of requests in flight, when weights change
    is_deterministic: bool = False  # deterministic kernels only
    returns_routing: bool = False  # completions have the experts that tokens took
    engine: str = DEFAULT_ENGINE  # its name in the registry
    options: EngineOptions = EngineOptions()

    @property
    def entry(self) -> EngineEntry:
        return engine_entry(self.engine)


@dataclass(frozen=True)
class EngineProcess:
    """The process that an engine is made in."""

    rank: int
    device: torch.device
    is_own: bool = False  # nothing else works in it, so that it may be ended to have the engine replaced
    adapted_layers: tuple[str, ...] = ()  # names of the layers that `adapter_targets` finds in the model


class EngineKind(ABC):
    """Checks what an engine can do, and makes it."""

    def problem(self) -> str | None:
        """Tell why the engine cannot be used on this machine; None if it can. Imports nothing large."""
        return None

    def refused_arguments(self, arguments: Mapping[str, Any]) -> list[tuple[str, str]]:
        """List (name, reason) of `engine_args` that a config cannot pass."""
        return []

    @abstractmethod
    def check_model(self, config: Any, max_length: int, tensor_parallel_size: int, is_cpu: bool) -> None:
        """Raise if the engine cannot run a model of this config."""

    def routing_problem(self, prefix_caching: bool, is_cpu: bool) -> str | None:
        """Tell why the engine cannot return the experts that tokens took; None if it can."""
        return None

    def prefix_problem(self, config: Any, is_cpu: bool) -> str | None:
        """Tell why the engine cannot cache prefixes of a model of this config; None if it can."""
        return None

    def adapter_problem(self, rank: int, dtype: str, is_cpu: bool) -> str | None:
        """Tell why the engine cannot apply adapters of this rank to a model of this dtype; None if it can."""
        return None

    @abstractmethod
    def make(self, settings: EngineSettings, process: EngineProcess) -> Engine:
        """Make the engine of a process."""


def engine_kind(name: str) -> EngineKind:
    """Return the kind of engine that an entry names."""
    kind: EngineKind = load(engine_entry(name).kind)()
    return kind
