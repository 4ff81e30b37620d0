"""Changes to vLLM inside its workers, and access to their memory: what depends on its version, from 0.25 to 0.32."""

from __future__ import annotations

import functools
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hotseat.algorithms.head import project
from hotseat.rollout.vllm_versions import ADAPTER_ID, ADAPTER_NAME, installed_version

_TRANSFORMERS_MODELS = "vllm.model_executor.models.transformers.base"
_CPU_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"


def _gated(activation: Callable[[torch.Tensor], torch.Tensor], gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate) * up


def _of_gpt_oss(gate_up: torch.Tensor) -> torch.Tensor:
    """Capped, with a line for values above 0 (`GptOssExperts` of transformers), of columns that alternate."""
    gate, up = gate_up[..., ::2].clamp(max=7.0), gate_up[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


# By vLLM's names: [tokens, 2 x intermediate] -> [tokens, intermediate].
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functools.partial(_gated, torch.nn.functional.silu),
    "gelu": functools.partial(_gated, torch.nn.functional.gelu),
    "gelu_tanh": functools.partial(_gated, functools.partial(torch.nn.functional.gelu, approximate="tanh")),
    "swigluoai": _of_gpt_oss,
}
PARTS = ("weights", "kv_cache")  # which are also the tags of memory in vLLM


def leave_weights_in_place() -> None:
    """Keep vLLM on a CPU from repacking weights, and compute layers and experts from weights as they were loaded.

    vLLM repacks the weights of linear layers and of experts, and pushed weights cannot be put in the place of those.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers import utils

    def dispatch(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = dispatch
    if importlib.util.find_spec(_CPU_EXPERTS) is not None:
        from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExpertsModular

        kernel = getattr(importlib.import_module(_CPU_EXPERTS), "CPUUnquantizedExperts", None)
        if kernel is not None and issubclass(kernel, FusedMoEExpertsModular):  # earlier versions have others
            kernel.process_weights_after_loading = lambda *_: None
            kernel.apply = _apply_experts


def leave_classes_alone() -> None:
    """Keep vLLM from changing the classes of transformers.

    If vLLM runs a model by transformers' own code (SmolLM3, OLMo 2), it changes the class of the model's body in order
    to compile it. Other models of that class in the process, such as the one under training, then fail. On a CPU
    nothing is compiled, so the class can stay as it is.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and importlib.util.find_spec(_TRANSFORMERS_MODELS) is not None:
        base: Any = getattr(importlib.import_module(_TRANSFORMERS_MODELS), "Base", None)
        if hasattr(base, "_decorate_for_torch_compile"):
            base._decorate_for_torch_compile = lambda *_: None


def _apply_experts(
    kernel: Any,
    *,
    output: torch.Tensor,  # [tokens, hidden], to be written
    hidden_states: torch.Tensor,  # [tokens, hidden]
    w1: torch.Tensor,  # [experts, 2 x intermediate, hidden], as it was loaded
    w2: torch.Tensor,  # [experts, hidden, intermediate]
    topk_weights: torch.Tensor,  # [tokens, k]
    topk_ids: torch.Tensor,
    activation: Any,
    apply_router_weight_on_input: bool,
    **_: Any,
) -> None:
    """Send each token through the experts that were chosen for it."""
    linear = torch.nn.functional.linear
    w1_bias, w2_bias = kernel.w1_bias, kernel.w2_bias  # [experts, 2 x intermediate] and [experts, hidden], or None
    output.zero_()
    for expert in topk_ids.unique().tolist():
        token, place = (topk_ids == expert).nonzero(as_tuple=True)
        gate_up = linear(hidden_states[token], w1[expert], None if w1_bias is None else w1_bias[expert])
        out = linear(_ACTIVATIONS[activation.value](gate_up), w2[expert], None if w2_bias is None else w2_bias[expert])
        if not apply_router_weight_on_input:  # otherwise the weight was applied to the input
            out = out * topk_weights[token, place, None].to(out.dtype)
        output.index_add_(0, token, out)


def experts_problem(model: torch.nn.Module) -> str | None:
    """Tell why new weights cannot be put where this model's experts are; None if they can."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.platforms import current_platform

    for module in model.modules():
        if not isinstance(module, RoutedExperts):
            continue
        method, config = module.quant_method, module.moe_config
        instead = "set rollout.engine to transformers"
        backend = getattr(getattr(method, "unquantized_backend", None), "name", None)
        is_ours = getattr(getattr(method, "experts_cls", None), "apply", None) is _apply_experts
        if not (is_ours if current_platform.is_cpu() else backend in ("TRITON", "BATCHED_TRITON")):
            kept = f"{backend} kernels want" if backend else f"{type(method).__name__} wants"
            return (
                f"vLLM {installed_version()} keeps the experts of this {type(model).__name__} as its {kept} them, and"
                f" new weights cannot be put there: {instead}"
            )
        activation = config.activation.value
        if is_ours and activation not in _ACTIVATIONS:
            return (
                f"the experts of this {type(model).__name__} have the activation {activation}, which is not"
                f" computed with vLLM on a CPU: {instead}"
            )
    return None


def widen_head(model: torch.nn.Module, model_config: Any) -> str | None:
    """Let a model compute float32 logits if its config asks for them; return why it cannot, or None.

    Since 0.26 vLLM's own `LogitsProcessor` does it. In older versions its step from hidden states to logits is
    replaced, which vLLM calls outside of captured graphs, once per step.
    """
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding

    if getattr(model_config.hf_config, "head_dtype", None) != "float32":
        return None
    processors = [module for module in model.modules() if isinstance(module, LogitsProcessor)]
    if all(hasattr(processor, "head_dtype") for processor in processors):
        return None
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and type(module.quant_method) is not UnquantizedEmbeddingMethod:
            return (
                f"vLLM {installed_version()} has the head of this {type(model).__name__} in"
                f" {type(module.quant_method).__name__}, which gives no float32 logits: set rollout.fp32_head to false"
            )
    for processor in processors:
        processor._get_logits = functools.partial(_wide_logits, processor)
    return None


def _wide_logits(
    processor: Any, hidden_states: torch.Tensor, lm_head: Any, embedding_bias: torch.Tensor | None
) -> torch.Tensor | None:
    """Compute float32 logits [tokens, vocab_size] of all ranks; None on ranks that do not get them."""
    logits = processor._gather_logits(project(hidden_states, lm_head.weight, embedding_bias))
    # Contiguous, as vLLM's own conversion to float32 would make it: its sampling kernels rely on that.
    return None if logits is None else logits[..., : processor.org_vocab_size].contiguous()


@dataclass(frozen=True)
class PromptScoring:
    """Distribution of which prompt log-probs are: at a temperature, and over the first tokens of the vocabulary."""

    temperature: float = 1.0
    vocab_size: int | None = None  # None: all

    def applied(self, logits: torch.Tensor) -> torch.Tensor:
        if self.temperature != 1.0:
            logits = logits.float() / self.temperature
        if self.vocab_size is not None and self.vocab_size < logits.shape[-1]:
            logits = logits.float().index_fill(
                -1, torch.arange(self.vocab_size, logits.shape[-1], device=logits.device), -torch.inf
            )
        return logits


def let_prompts_be_scored_by(model_runner: Any, scoring: Callable[[], PromptScoring]) -> None:
    """Make vLLM's prompt log-probs those of a distribution: change the logits behind them, and no others."""
    if hasattr(model_runner, "_get_prompt_logprobs_dict"):
        of_prompts, model = model_runner._get_prompt_logprobs_dict, model_runner.model

        def scored(*args: Any, **kwargs: Any) -> Any:
            compute = model.compute_logits
            model.compute_logits = lambda *args_of_logits: scoring().applied(compute(*args_of_logits))
            try:
                return of_prompts(*args, **kwargs)
            finally:
                del model.compute_logits  # the class's own shows again

        model_runner._get_prompt_logprobs_dict = scored
        return
    worker = model_runner.prompt_logprobs_worker
    of_batch = worker.compute_prompt_logprobs

    def scored_batch(logits_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return of_batch(lambda *args_of_logits: scoring().applied(logits_fn(*args_of_logits)), *args, **kwargs)

    worker.compute_prompt_logprobs = scored_batch


# --- adapters ---------------------------------------------------------------------------------------------------------


def add_adapter(model_runner: Any) -> None:
    """Register an adapter of zeros under `ADAPTER_ID`, and keep it in the only slot of vLLM's layers."""
    from vllm.lora.request import LoRARequest

    manager = model_runner.lora_manager
    manager.remove_all_adapters()
    rank = manager.lora_config.max_lora_rank
    manager.add_dummy_lora(LoRARequest(ADAPTER_NAME, ADAPTER_ID, ADAPTER_NAME), rank)
    manager._adapter_manager.activate_adapter(ADAPTER_ID)


def clear_adapter(model_runner: Any) -> None:
    """Set the memory of the adapter to zeros, and forget which requests use it: what was there is lost."""
    manager = getattr(model_runner, "lora_manager", None)
    if manager is None:
        return
    for layer in manager._adapter_manager.modules.values():
        layer.reset_lora(0)
    # vLLM writes the indices of requests to its device anew only if they differ from those of the last step.
    manager._adapter_manager._last_mapping = None


# --- parts of a worker's memory ---------------------------------------------------------------------------------------


def part_bytes(worker: Any) -> dict[str, int]:
    """Return the bytes of each part on the worker's device."""
    if torch.cuda.is_available():
        sizes = Counter[str]()
        for _, data in _pointers():
            sizes[data.tag] += data.handle[1]
        return {part: sizes[part] for part in PARTS}
    tensors = {"weights": worker.model_runner.model.parameters(), "kv_cache": _tensors(worker.model_runner.kv_caches)}
    storages = {part: [tensor.untyped_storage() for tensor in tensors[part]] for part in PARTS}
    return {part: sum({each.data_ptr(): each.nbytes() for each in storages[part]}.values()) for part in PARTS}


def offload(parts: Sequence[str], keep_weights: bool) -> tuple[int, int]:
    """Free the memory of these parts, with or without a copy of the weights in host memory: (bytes, bytes copied)."""
    from vllm.device_allocator.cumem import libcudart, unmap_and_release

    # vLLM's own `sleep` takes all parts at once, and the oldest versions do not see that one is asleep already.
    chosen = [(pointer, data) for pointer, data in _pointers() if data.tag in parts and not data.is_asleep]
    copies: dict[int, torch.Tensor] = {}
    for pointer, data in chosen:  # first what can fail: host memory may run out
        if data.tag == "weights" and keep_weights:
            copies[pointer] = torch.empty(data.handle[1], dtype=torch.uint8, pin_memory=True)
            libcudart.cudaMemcpy(copies[pointer].data_ptr(), pointer, data.handle[1])
    for pointer, data in chosen:
        data.cpu_backup_tensor = copies.get(pointer)
        unmap_and_release(data.handle)
        data.is_asleep = True
    torch.cuda.empty_cache()
    return sum(data.handle[1] for _, data in chosen), sum(copy.numel() for copy in copies.values())


def onload(model_runner: Any, parts: Sequence[str]) -> tuple[int, int]:
    """Give these parts memory again, with the values that were kept, if any: (bytes, bytes copied)."""
    from vllm.device_allocator.cumem import create_and_map, libcudart

    num_bytes = num_copied = 0
    for pointer, data in _pointers():
        if data.tag not in parts or not data.is_asleep:
            continue
        create_and_map(data.handle)
        data.is_asleep = False
        num_bytes += data.handle[1]
        if data.cpu_backup_tensor is not None:
            libcudart.cudaMemcpy(pointer, data.cpu_backup_tensor.data_ptr(), data.handle[1])
            num_copied += data.handle[1]
            data.cpu_backup_tensor = None
    if "kv_cache" in parts and hasattr(model_runner, "post_kv_cache_wake_up"):
        model_runner.post_kv_cache_wake_up()
    return num_bytes, num_copied


def _pointers() -> list[tuple[int, Any]]:
    from vllm.device_allocator.cumem import CuMemAllocator

    return list(CuMemAllocator.get_instance().pointer_to_data.items())


def _tensors(caches: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of caches, of which some are pairs."""
    for cache in caches:
        if isinstance(cache, torch.Tensor):
            yield cache
        else:
            yield from _tensors(cache)
