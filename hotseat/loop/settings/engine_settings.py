"""Makes settings of engines: what they load, and how they sample."""

from __future__ import annotations

from pathlib import Path

from hotseat.config import Config
from hotseat.config.image_paths import largest_image
from hotseat.config.precision import dtype_of
from hotseat.config.resolved import judge_length, max_new_tokens, source_of
from hotseat.errors import UserError
from hotseat.loop.settings.training_options import lora_options
from hotseat.planning.config_plan import CacheLimit
from hotseat.planning.role_specs import engine_of, engine_slots
from hotseat.rollout.kinds import EngineOptions, EngineSettings, ImageOptions, engine_kind
from hotseat.types import Sampling


def rollout_sampling(config: Config) -> Sampling:
    rollout = config.rollout
    return Sampling(
        max_new_tokens=max_new_tokens(config),
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
    )


def eval_sampling(config: Config) -> Sampling:
    return Sampling(max_new_tokens=max_new_tokens(config), temperature=config.eval.temperature)


def engine_dtype(config: Config) -> str:
    return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[dtype_of(config)]


def are_adapters_alone(config: Config, on_gpu: bool) -> bool:
    """Tell whether engines get adapters without the other weights. Raises if these could not apply them."""
    if config.rollout.lora_sync == "merged":
        return False
    kind = engine_kind(config.rollout.engine)
    problem = kind.adapter_problem(config.train.lora.rank, engine_dtype(config), is_cpu=not on_gpu)
    if problem is not None:
        raise UserError(f"rollout.lora_sync is adapter: {problem}; set it to merged")
    return True


def engine_settings(
    config: Config,
    eos_token_ids: tuple[int, ...],
    logs: Path,
    *,
    limit: CacheLimit | None = None,
    adapters_alone: bool = False,
    num_slots: int | None = None,
) -> EngineSettings:
    """Return the settings of the rollout engines. `logs`: the folder for their logs. `limit`: of their caches.

    num_slots: sequences that one engine decodes at a time; None: what the config says. Where it is fewer, prompts are
    kept in the room of the others: of simulators that an action did not change, and that are asked for again.
    """
    rollout, all_slots = config.rollout, engine_slots(config)
    num_slots = num_slots or all_slots
    lora = lora_options(config) if adapters_alone else None
    options = EngineOptions(
        tensor_parallel_size=rollout.tensor_parallel_size,
        memory_share=rollout.memory_share if limit is None else limit.share,
        cache_gib=None if limit is None else limit.gib,
        prefix_caching=rollout.prefix_caching,
        enforce_eager=rollout.enforce_eager,
        logs=str(logs),
        engine_args=rollout.engine_args,
        adapter_rank=0 if lora is None else lora.rank,
        adapter_targets=() if lora is None else lora.target_modules,
        images=image_options(config),
        fp8_weights=rollout.quantization is not None,
        fp8_cache=rollout.kv_cache_dtype is not None,
    )
    return EngineSettings(
        model=source_of(config, config.actor.model),
        max_length=config.data.max_length,
        num_slots=num_slots,
        eos_token_ids=eos_token_ids,
        dtype=engine_dtype(config),
        num_threads=config.cluster.threads_per_process,
        fp32_head=rollout.fp32_head,
        num_kept_prompts=engine_of(config).num_kept_prompts + all_slots - num_slots,
        keeps_cache=config.overlap.in_flight == "keep",
        is_deterministic=config.train.full_determinism,
        engine=rollout.engine,
        options=options,
    )


def judge_engine_settings(
    config: Config, eos_token_ids: tuple[int, ...], logs: Path, *, limit: CacheLimit | None = None
) -> EngineSettings:
    """Return the settings of the judge's engines. `logs`: the folder for their logs. `limit`: of their caches."""
    judge, engine = config.reward.judge, config.reward.judge.engine
    options = EngineOptions(
        tensor_parallel_size=engine.tensor_parallel_size,
        memory_share=engine.memory_share if limit is None else limit.share,
        cache_gib=None if limit is None else limit.gib,
        prefix_caching=True,  # the votes on an answer are the same request, and all requests begin with the rubric
        enforce_eager=engine.enforce_eager,
        logs=str(logs),
        role="judge",
    )
    return EngineSettings(
        model=source_of(config, judge.model),
        max_length=judge_length(config),
        num_slots=engine_slots(config, "judge"),
        eos_token_ids=eos_token_ids,
        dtype=engine_dtype(config),
        num_threads=config.cluster.threads_per_process,
        is_deterministic=config.train.full_determinism,
        engine=engine.kind,
        options=options,
    )


def image_options(config: Config) -> ImageOptions | None:
    """Return bounds on the images of requests; None if no images were prepared for this config."""
    largest = largest_image(config)
    if config.data.image_key is None or not largest.exists():
        return None
    return ImageOptions(config.data.max_images_per_prompt, str(largest))
