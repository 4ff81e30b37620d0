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

_DRAFT_METHODS = ("ngram", "ngram_gpu")  # a draft is what followed the same tokens earlier in the request
_DRAFT_KEYS = ("method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
_RANKS = "an engine is one process per device of rollout.tensor_parallel_size, on one node"

# Keys of the config, and the arguments that each sets.
_SET_BY: Mapping[str, str] = {
    "actor.model": "model model_weights hf_config_path revision code_revision",
    "train.dtype": "dtype",
    "seed": "seed",
    "data.max_length": "max_model_len",
    "trust_remote_code": "trust_remote_code",
    "rollout.tensor_parallel_size": "tensor_parallel_size",
    "cluster.component_placement": "device_ids",
    "rollout.memory_share": "gpu_memory_utilization kv_cache_memory_bytes",
    "rollout.prefix_caching": "enable_prefix_caching",
    "rollout.enforce_eager": "enforce_eager",
    "algorithm.distill.top_k": "max_logprobs",
    "rollout.routing_replay": "enable_return_routed_experts aux_output_config",
    "rollout.enable_offload": (
        "enable_sleep_mode enable_cumem_allocator sleep_mode_offload_cudagraph sleep_preserve_parameter_names"
    ),
    "rollout.fp32_head": "hf_overrides",
    "rollout.quantization": "quantization",
    "rollout.kv_cache_dtype": "kv_cache_dtype",
    "rollout.weight_transport": "weight_transfer_config",
    "data.max_images_per_prompt": "limit_mm_per_prompt",
}
# Reasons why arguments that no key sets cannot be set, and those arguments.
_RELIED_ON: Mapping[str, str] = {
    "the engine takes and returns token ids, and needs no tokenizer": (
        "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init"
    ),
    "the engine drives vLLM's scheduler and workers itself": (
        "runner convert scheduler_cls worker_cls worker_extension_cls disable_log_stats use_tqdm_on_load"
    ),
    "the engine has a fixed number of slots; agent.max_concurrent bounds what is sent to it": "max_num_seqs",
    "on a CPU prompts must not be cut, and elsewhere vLLM's default is relied on": "enable_chunked_prefill",
    "log-probs must be those of the distribution that was sampled from": "logprobs_mode",
    "tokens must be sampled from the distribution that the trainer computes": (
        "logits_processors generation_config override_generation_config disable_sliding_window diffusion_config"
    ),
    "states of linear attention are in fp32, as the trainer has them": "mamba_ssm_cache_dtype gdn_prefill_backend",
    "speculative_config sets it, and takes n-gram drafts alone": "spec_method spec_model spec_tokens",
    _RANKS: (
        "distributed_executor_backend pipeline_parallel_size prefill_context_parallel_size"
        " decode_context_parallel_size nnodes node_rank master_addr master_port"
    ),
    "weights are pushed to the places where vLLM's layers keep them on the device": (
        "moe_backend enable_expert_parallel enable_ep_weight_filter enable_elastic_ep enable_eplb eplb_config"
        " expert_placement_strategy offload_backend cpu_offload_gb cpu_offload_params offload_group_size"
        " offload_num_in_group offload_prefetch_step offload_params"
    ),
    "vLLM quantises weights when it loads them, and pushed ones would be put, unquantised, in their places": (
        "quantization_config"
    ),
    "images are prepared once, by the run, and their pixels are what the trainer learns from": (
        "mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type mm_processor_device mm_device_do_normalize"
        " media_io_kwargs enable_mm_embeds language_model_only"
    ),
    "train.lora and rollout.lora_sync decide it": (
        "enable_lora max_loras max_lora_rank max_cpu_loras lora_dtype lora_target_modules fully_sharded_loras"
        " default_mm_loras specialize_active_lora enable_tower_connector_lora enable_mixed_moe_lora_format"
        " enable_moe_shared_loras"
    ),
}
# Why each argument is refused.
_REASONS: Mapping[str, str] = {
    **{name: f"{key} sets it" for key, names in _SET_BY.items() for name in names.split()},
    **{name: f"cannot be set: {why}" for why, names in _RELIED_ON.items() for name in names.split()},
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
    if name in _REASONS:
        return _REASONS[name]
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
