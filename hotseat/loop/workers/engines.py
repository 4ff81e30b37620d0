"""Makes rollout engines from a run's settings."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hotseat.cluster import in_worker_process
from hotseat.determinism import keep_float32, use_batch_invariant_kernels, use_deterministic_kernels
from hotseat.planning.config_plan import DEFAULT_ENGINE_SHARE, KEPT_PROMPTS
from hotseat.rollout import Engine, SlotOptions, TransformersEngine, vllm_engine
from hotseat.rollout._progress import stages_shown
from hotseat.train.backend import LoraOptions
from hotseat.train.lora import target_layers
from hotseat.vision import policy_class


def device_of_process() -> torch.device:
    """Return the device of this process: a GPU if it sees one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class EngineSettings:
    """Settings of a rollout engine."""

    model: str
    max_length: int
    num_slots: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    num_threads: int
    trust_remote_code: bool = False
    fp32_head: bool = True
    num_kept_prompts: int = KEPT_PROMPTS  # of full length, for other requests that begin alike
    keeps_cache: bool = True  # of requests in flight, when weights change
    is_deterministic: bool = False  # deterministic kernels only
    vllm: VllmSettings | None = None  # None: the transformers engine


@dataclass(frozen=True)
class VllmSettings:
    """Settings that only vLLM has."""

    tensor_parallel_size: int
    memory_share: float | None  # None: the default; ignored on a CPU, where the cache is as large as the slots need
    prefix_caching: bool
    enforce_eager: bool
    logs: str  # the folder for its log
    cache_gib: float | None = None  # None: as much as the memory share has room for
    engine_args: Mapping[str, Any] = field(default_factory=dict)  # further ones, by vLLM's names
    lora: LoraOptions | None = None  # adapters that it gets apart from weights; None: merged into them, if any
    images: vllm_engine.ImageOptions | None = None  # None: requests have none
    fp8_weights: bool = False  # of linear layers
    fp8_cache: bool = False  # keys and values
    role: str = "rollout"  # names its log


def make_engine(settings: EngineSettings, rank: int, show: Callable[[str], object] = lambda stage: None) -> Engine:
    """Make the engine of a rank. show: is called with what happens now, where the engine says so."""
    keep_float32()
    if settings.is_deterministic:
        use_deterministic_kernels()
        if settings.vllm is not None and device_of_process().type != "cpu":
            use_batch_invariant_kernels()
    if settings.vllm is None:
        return _transformers_engine(settings)
    with stages_shown(show):
        return _vllm_engine(settings, settings.vllm, rank)


def _transformers_engine(settings: EngineSettings) -> Engine:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(settings.model, trust_remote_code=settings.trust_remote_code)
    model = policy_class(config).from_pretrained(
        settings.model,
        dtype=getattr(torch, settings.dtype),
        trust_remote_code=settings.trust_remote_code,
        use_safetensors=True,
    )
    return TransformersEngine(
        model,
        max_length=settings.max_length,
        num_slots=settings.num_slots,
        eos_token_ids=settings.eos_token_ids,
        num_threads=settings.num_threads,
        options=SlotOptions(
            device=device_of_process(),
            fp32_head=settings.fp32_head,
            prefix_cache_tokens=settings.num_kept_prompts * settings.max_length,
            keeps_cache=settings.keeps_cache,
        ),
    )


def _vllm_engine(settings: EngineSettings, vllm: VllmSettings, rank: int) -> Engine:
    log = Path(vllm.logs) / f"{vllm.role}-{rank}.log"
    os.environ.update(vllm_engine.log_to(log))
    on_cpu = device_of_process().type == "cpu"
    share = None if on_cpu else vllm.memory_share or DEFAULT_ENGINE_SHARE
    adapters = None
    if vllm.lora is not None:
        layers = target_layers(settings.model, vllm.lora.target_modules, settings.trust_remote_code)
        adapters = vllm_engine.AdapterOptions(vllm.lora.rank, tuple(layers))
    options = vllm_engine.CoreOptions(
        model=settings.model,
        dtype=settings.dtype,
        max_length=settings.max_length,
        num_slots=settings.num_slots,
        tensor_parallel_size=vllm.tensor_parallel_size,
        memory_share=share,
        kv_cache_bytes=_cache_bytes(settings, vllm, on_cpu),
        prefix_caching=vllm.prefix_caching,
        enforce_eager=vllm.enforce_eager,
        trust_remote_code=settings.trust_remote_code,
        fp32_head=settings.fp32_head,
        engine_args=vllm.engine_args,
        adapters=adapters,
        images=vllm.images,
        fp8_weights=vllm.fp8_weights,
        fp8_cache=vllm.fp8_cache,
    )
    names = vllm_engine.weight_names(settings.model, settings.trust_remote_code, adapters)
    try:
        core = vllm_engine.Core(options, when_lost=_end_process if in_worker_process() else None)
    except Exception as error:
        raise vllm_engine.start_error(error, settings.model, log) from None
    if in_worker_process():
        gc.freeze()  # what vLLM and torch keep for good is not searched for garbage again in the middle of a rollout
    try:
        return vllm_engine.VllmEngine(
            core,
            names,
            max_length=settings.max_length,
            num_slots=settings.num_slots,
            eos_token_ids=settings.eos_token_ids,
            num_threads=settings.num_threads if on_cpu else None,
            keeps_cache=settings.keeps_cache,
        )
    except BaseException:
        core.close()
        raise


def _cache_bytes(settings: EngineSettings, vllm: VllmSettings, on_cpu: bool) -> int | None:
    if not on_cpu:
        return None if vllm.cache_gib is None else int(vllm.cache_gib * 2**30)
    sequences = (settings.max_length, settings.num_slots)
    return vllm_engine.cache_bytes(
        settings.model, settings.dtype, sequences, vllm.tensor_parallel_size, settings.trust_remote_code
    )


def _end_process() -> None:
    """End this process, so that the engine is replaced: it has lost one of its tensor-parallel processes."""
    print("a tensor-parallel rank of this engine died, and the engine ends with it", file=sys.stderr, flush=True)
    os._exit(1)
