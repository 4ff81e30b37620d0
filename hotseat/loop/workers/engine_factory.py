"""Makes rollout engines from a run's settings."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hotseat.cluster import in_worker_process
from hotseat.determinism import keep_float32, use_deterministic_kernels
from hotseat.rollout import Engine
from hotseat.rollout.kinds import EngineProcess, EngineSettings, engine_kind
from hotseat.rollout.vllm_progress import stages_shown
from hotseat.train.lora import target_layers


def device_of_process() -> torch.device:
    """Return the device of this process: a GPU if it sees one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_engine(settings: EngineSettings, rank: int, show: Callable[[str], object] = lambda stage: None) -> Engine:
    """Make the engine of a rank. show: is called with what happens now, where the engine says so."""
    keep_float32()
    if settings.is_deterministic:
        use_deterministic_kernels()
    layers: list[str] = []
    if settings.options.adapter_rank:
        layers = target_layers(settings.model, settings.options.adapter_targets, settings.trust_remote_code)
    process = EngineProcess(rank, device_of_process(), in_worker_process(), tuple(layers))
    with stages_shown(show):
        return engine_kind(settings.engine).make(settings, process)
