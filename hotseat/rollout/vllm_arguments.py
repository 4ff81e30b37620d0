"""Arguments of vLLM's engine that a config may set (`rollout.engine_args`), and those that it may not.

Nothing here imports vLLM: the names of its arguments are read from its source, which takes a few hundredths of a second
where importing it takes several.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotseat.rollout.vllm_versions import installed_version, is_cpu_build

# The key that sets an argument.
_SET_BY: Mapping[str, str] = {
    "model": "actor.model",
    "model_weights": "actor.model",
    "hf_config_path": "actor.model",
    "revision": "actor.model",
    "code_revision": "actor.model",
    "dtype": "train.dtype",
    "seed": "seed",
    "max_model_len": "data.max_length",
    "trust_remote_code": "trust_remote_code",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "device_ids": "cluster.component_placement",
    "gpu_memory_utilization": "rollout.memory_share",
    "kv_cache_memory_bytes": "rollout.memory_share",
    "enable_prefix_caching": "rollout.prefix_caching",
    "enforce_eager": "rollout.enforce_eager",
    "enable_sleep_mode": "rollout.enable_offload",
    "enable_cumem_allocator": "rollout.enable_offload",
    "sleep_mode_offload_cudagraph": "rollout.enable_offload",
    "sleep_preserve_parameter_names": "rollout.enable_offload",
    "hf_overrides": "rollout.fp32_head",
    "quantization": "rollout.quantization",
    "kv_cache_dtype": "rollout.kv_cache_dtype",
    "weight_transfer_config": "rollout.weight_transport",
    "limit_mm_per_prompt": "data.max_images_per_prompt",
}

_TOKENS = "the engine takes and returns token ids, and needs no tokenizer"
_PLACES = "weights are pushed to the places where vLLM's layers keep them on the device"
_ONCE = "vLLM quantises weights when it loads them, and pushed ones would be put, unquantised, in their places"
_POLICY = "tokens must be sampled from the distribution that the trainer computes"
_DRAFTS = "speculative_config sets it, and takes n-gram drafts alone"
_DRAFT_METHODS = ("ngram", "ngram_gpu")  # a draft is what followed the same tokens earlier in the request
_DRAFT_KEYS = ("method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
_RANKS = "an engine is one process per device of rollout.tensor_parallel_size, on one node"
_DRIVEN = "the engine drives vLLM's scheduler and workers itself"
_PIXELS = "images are prepared once, by the run, and their pixels are what the trainer learns from"
_LORA = "train.lora and rollout.lora_sync decide it"

# Why an argument cannot be set, where no key sets it.
_RELIED_ON: Mapping[str, str] = {
    "tokenizer": _TOKENS,
    "tokenizer_mode": _TOKENS,
    "tokenizer_revision": _TOKENS,
    "skip_tokenizer_init": _TOKENS,
    "runner": _DRIVEN,
    "convert": _DRIVEN,
    "scheduler_cls": _DRIVEN,
    "worker_cls": _DRIVEN,
    "worker_extension_cls": _DRIVEN,
    "disable_log_stats": _DRIVEN,
    "use_tqdm_on_load": _DRIVEN,
    "max_num_seqs": "the engine has a fixed number of slots; agent.max_concurrent bounds what is sent to it",
    "enable_chunked_prefill": "on a CPU prompts must not be cut, and elsewhere vLLM's default is relied on",
    "logprobs_mode": "log-probs must be those of the distribution that was sampled from",
    "logits_processors": _POLICY,
    "generation_config": _POLICY,
    "override_generation_config": _POLICY,
    "disable_sliding_window": _POLICY,
    "spec_method": _DRAFTS,
    "spec_model": _DRAFTS,
    "spec_tokens": _DRAFTS,
    "diffusion_config": _POLICY,
    "distributed_executor_backend": _RANKS,
    "pipeline_parallel_size": _RANKS,
    "prefill_context_parallel_size": _RANKS,
    "decode_context_parallel_size": _RANKS,
    "nnodes": _RANKS,
    "node_rank": _RANKS,
    "master_addr": _RANKS,
    "master_port": _RANKS,
    "moe_backend": _PLACES,
    "enable_expert_parallel": _PLACES,
    "enable_ep_weight_filter": _PLACES,
    "enable_elastic_ep": _PLACES,
    "enable_eplb": _PLACES,
    "eplb_config": _PLACES,
    "expert_placement_strategy": _PLACES,
    "offload_backend": _PLACES,
    "cpu_offload_gb": _PLACES,
    "cpu_offload_params": _PLACES,
    "offload_group_size": _PLACES,
    "offload_num_in_group": _PLACES,
    "offload_prefetch_step": _PLACES,
    "offload_params": _PLACES,
    "quantization_config": _ONCE,
    "mm_processor_kwargs": _PIXELS,
    "mm_processor_cache_gb": _PIXELS,
    "mm_processor_cache_type": _PIXELS,
    "mm_processor_device": _PIXELS,
    "mm_device_do_normalize": _PIXELS,
    "media_io_kwargs": _PIXELS,
    "enable_mm_embeds": _PIXELS,
    "language_model_only": _PIXELS,
    "enable_lora": _LORA,
    "max_loras": _LORA,
    "max_lora_rank": _LORA,
    "max_cpu_loras": _LORA,
    "lora_dtype": _LORA,
    "lora_target_modules": _LORA,
    "fully_sharded_loras": _LORA,
    "default_mm_loras": _LORA,
    "specialize_active_lora": _LORA,
    "enable_tower_connector_lora": _LORA,
    "enable_mixed_moe_lora_format": _LORA,
    "enable_moe_shared_loras": _LORA,
}


def refusals(arguments: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List (name, reason) of arguments that a config cannot pass to the vLLM that is installed."""
    known = argument_names()
    refused = []
    for name, value in arguments.items():
        reason = _draft_problem(value) if name == "speculative_config" else _refusal(name, known)
        if reason is not None:
            refused.append((name, reason))
    return refused


def _refusal(name: str, known: frozenset[str]) -> str | None:
    key = _SET_BY.get(name)
    if key is not None:
        return f"{key} sets it"
    if name in _RELIED_ON:
        return f"cannot be set: {_RELIED_ON[name]}"
    if name.startswith("data_parallel_"):
        return f"cannot be set: {_RANKS}; rollout.num_engines sets how many there are"
    if name not in known:
        close = difflib.get_close_matches(name.lstrip("-").replace("-", "_"), known, n=3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        return f"vLLM {installed_version()} has no such argument{hint}"
    return None


def _draft_problem(drafts: Any) -> str | None:
    """Tell why vLLM cannot draft tokens in this way; None if it can.

    Drafts from the request's own tokens need no second model, and vLLM keeps or replaces each so that samples follow
    the policy; the log-probs that it returns are the policy's. Its CPU build has no kernel for that, and divides logits
    by temperatures that it never wrote.
    """
    instead = "set {method: ngram, num_speculative_tokens: 4}, which drafts from earlier tokens of the answer"
    if not isinstance(drafts, Mapping):
        return f"is {drafts!r}, and takes keys with values: {instead}"
    method = drafts.get("method")
    if method not in _DRAFT_METHODS:
        why = "drafts by a model would need weights that no push brings"
        return f"cannot have the method {method!r}: {why}; {instead}"
    unknown = [str(key) for key in drafts if key not in _DRAFT_KEYS]
    if unknown:
        return f"cannot have {', '.join(sorted(unknown))}: n-gram drafts have {', '.join(_DRAFT_KEYS)}"
    number = drafts.get("num_speculative_tokens")
    if not _is_count(number):
        return f"num_speculative_tokens is {number!r}: set how many tokens to draft, such as 4"
    lengths = {key: drafts[key] for key in ("prompt_lookup_min", "prompt_lookup_max") if drafts.get(key) is not None}
    for key, length in lengths.items():
        if not _is_count(length):
            return f"{key} is {length!r}: set how many tokens an n-gram has, such as 3, or leave it out"
    least, most = lengths.get("prompt_lookup_min"), lengths.get("prompt_lookup_max")
    if least is not None and most is not None and least > most:
        return (
            f"prompt_lookup_min is {least}, above prompt_lookup_max, which is {most}: lower the one or raise the other"
        )
    if is_cpu_build():
        return f"the CPU build of vLLM {installed_version()} returns wrong log-probs of drafted tokens: unset it"
    if method == "ngram" and importlib.util.find_spec("numba") is None:
        return "the method ngram needs the package numba, which is not installed: install it, or set ngram_gpu"
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def argument_names() -> frozenset[str]:
    """Return the names of vLLM's engine arguments, the fields of its `EngineArgs`."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None, "vLLM is installed"
    assert spec.submodule_search_locations
    source = Path(spec.submodule_search_locations[0]) / "engine" / "arg_utils.py"
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            fields = [field.target for field in node.body if isinstance(field, ast.AnnAssign)]
            return frozenset(
                target.id for target in fields if isinstance(target, ast.Name) and not target.id.startswith("_")
            )
    raise AssertionError(f"{source} has no EngineArgs")
