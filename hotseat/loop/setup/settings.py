"""Makes the settings of each worker from the config. Workers never see the config."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hotseat.agents import Deadlines, ProgramSettings
from hotseat.agents.environments.families import EnvironmentSettings, settings_of
from hotseat.config import Config
from hotseat.config.batches import is_auto, num_checkpointed, token_budget, tokens_per_micro_batch, warmup_steps
from hotseat.config.chat_template import chat_template_text
from hotseat.config.images import filler_image, image_folder, largest_image
from hotseat.config.precision import dtype_of
from hotseat.config.resolved import (
    aggregation,
    correction_kind,
    judge_length,
    kl_estimator,
    max_new_tokens,
    max_sampled_tokens,
    ratio_step,
)
from hotseat.config.roles import (
    compares_with_reference,
    has_agent,
    has_critic,
    has_images,
    has_inference,
    has_reward_model,
    has_simulator,
    is_base_reference,
)
from hotseat.config.schema import OptimizerConfig, RolloutConfig, TrainConfig
from hotseat.config.urls import as_list
from hotseat.data.images import ImageLimits
from hotseat.envs.loading import SimulatorSettings
from hotseat.errors import UserError
from hotseat.loop.planning.plan import KEPT_PROMPTS, CacheLimit, engine_slots, episodes_per_engine
from hotseat.loop.setup.graders import eval_graders_of, graders_of, sandbox_of
from hotseat.loop.setup.judge import judge_of
from hotseat.loop.setup.value_models import critic_aux_loss, reward_scale
from hotseat.loop.state.run_dir import EPISODE_IMAGES, NOTES, ROLLOUTS, SPOOL
from hotseat.loop.workers.component import ComponentSettings
from hotseat.loop.workers.cutting import BatchSettings
from hotseat.loop.workers.engines import EngineSettings, VllmSettings
from hotseat.loop.workers.experience import AdvantageSettings
from hotseat.loop.workers.losses import PolicyObjective, ValueObjective
from hotseat.loop.workers.models import PolicySettings
from hotseat.loop.workers.reference import ReferenceSettings
from hotseat.loop.workers.rollout_host import HostSettings
from hotseat.loop.workers.sight import HostImages
from hotseat.loop.workers.simulation import SimulationSettings
from hotseat.loop.workers.user_functions import absolute
from hotseat.loop.workers.value_models import CriticSettings, RewardSettings
from hotseat.placement import Plan
from hotseat.registry.estimators import estimator_entry
from hotseat.rewards.addresses import bearer_token
from hotseat.rollout import vllm_engine, vllm_versions
from hotseat.train.backend import AdamW, LoraOptions, Muon, Precision, TrainOptions, ZeroOptions
from hotseat.train.schedule import Schedule
from hotseat.types import Sampling
from hotseat.weights import TransportPlan, choose_transports

# Seconds of an attempt to score a group, and further attempts. Those of servers are OpenRLHF's.
FUNCTION_LIMITS, SERVER_LIMITS = (60.0, 2), (180.0, 4)
REFERENCE_FOLDER = "reference_log_probs"  # beside the runs, which share it


def sampling(config: Config) -> Sampling:
    rollout = config.rollout
    return Sampling(
        max_new_tokens=max_new_tokens(config),
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
    )


def eval_sampling(config: Config) -> Sampling:
    return Sampling(max_new_tokens=max_new_tokens(config), temperature=config.eval.temperature)


def train_options(config: Config, schedule_length: int, *, is_trained: bool = True) -> TrainOptions:
    """Return the backend options of the actor, or of a model that is not trained and has no optimizer."""
    train = config.train
    return TrainOptions(
        precision=_precision(config, is_trained),
        optimizer=_adamw(config.actor.optimizer) if is_trained else None,
        muon=_muon(config.actor.optimizer) if is_trained else None,
        schedule=_schedule(config.actor.optimizer, schedule_length) if is_trained else Schedule(),
        max_grad_norm=config.actor.optimizer.max_grad_norm or None,
        aux_loss_coefficient=config.algorithm.aux_loss_coef if is_trained else 0.0,
        lora=lora_options(config) if is_trained else None,
        average_decay=train.ema.beta if train.ema.enabled and is_trained else None,
        gradient_checkpointing=train.gradient_checkpointing,
        checkpointed_layers=num_checkpointed(config),
        compile=train.compile,
        liger_kernel=train.liger_kernel,
        freeze_visual_encoder=train.freeze_visual_encoder and is_trained,
        filler_image=str(filler_image(config)) if has_images(config) else None,
        layout="auto" if train.packing else "padded",
        attention=train.attention,
        is_deterministic=train.full_determinism,
        sequence_parallel_size=train.sequence_parallel_size,
        max_non_finite=train.max_skipped_steps,
        timeout_s=config.cluster.call_timeout_s,
        zero=_zero(config, is_trained),
    )


def _zero(config: Config, is_trained: bool) -> ZeroOptions | None:
    zero = config.train.deepspeed
    if config.train.backend != "deepspeed":
        return None
    return ZeroOptions(
        stage=zero.zero_stage,
        adam_offload=zero.adam_offload and is_trained,  # a model that is only scored has no Adam
        zpg=zero.zpg,
        overlap_comm=zero.overlap_comm,
        grad_accum_dtype=zero.grad_accum_dtype,
        deepcompile=zero.deepcompile,
        tensor_parallel_size=zero.tensor_parallel_size,
    )


def lora_options(config: Config) -> LoraOptions | None:
    lora = config.train.lora
    if lora.rank == 0:
        return None
    targets = lora.target_modules if isinstance(lora.target_modules, str) else tuple(lora.target_modules)
    return LoraOptions(lora.rank, lora.alpha, lora.dropout, targets, config.seed)


def reference_settings(config: Config, is_offloaded: bool) -> ReferenceSettings | None:
    """Return the settings of a rank's reference in preference optimisation; None if its loss has none."""
    if not compares_with_reference(config):
        return None
    model = config.reference.model or config.actor.model
    assert model is not None
    return ReferenceSettings(
        model=model,
        options=None if is_base_reference(config) else train_options(config, 0, is_trained=False),
        dtype=dtype_of(config),
        is_offloaded=is_offloaded and not config.algorithm.dpo.precompute,
        folder=str(Path(config.run_dir) / REFERENCE_FOLDER) if config.algorithm.dpo.precompute else None,
    )


def critic_options(config: Config, schedule_length: int) -> TrainOptions:
    optimizer = config.critic.optimizer
    return replace(
        train_options(config, schedule_length),
        head="value",
        value_head_prefix=config.critic.value_head_prefix,
        optimizer=_adamw(optimizer),
        muon=_muon(optimizer),
        schedule=_schedule(optimizer, schedule_length),
        max_grad_norm=optimizer.max_grad_norm or None,
        aux_loss_coefficient=critic_aux_loss(config),
        average_decay=None,
    )


def reward_options(config: Config) -> TrainOptions:
    return replace(
        train_options(config, 0, is_trained=False),
        head="value",
        value_head_prefix=config.reward.value_head_prefix,
    )


def reward_limits(config: Config) -> tuple[float, int]:
    """Return the deadline of an attempt to score a group, and the number of further attempts."""
    timeout_s, retries = SERVER_LIMITS if config.reward.url is not None else FUNCTION_LIMITS
    reward = config.reward
    return (
        timeout_s if reward.timeout_s is None else reward.timeout_s,
        retries if reward.retries is None else reward.retries,
    )


def _adamw(optimizer: OptimizerConfig) -> AdamW:
    return AdamW(optimizer.betas, optimizer.eps, optimizer.weight_decay)


def _muon(optimizer: OptimizerConfig) -> Muon | None:
    return Muon(optimizer.muon.learning_rate, optimizer.muon.momentum) if optimizer.kind == "muon" else None


def _schedule(optimizer: OptimizerConfig, num_steps: int) -> Schedule:
    return Schedule(
        kind=optimizer.schedule,
        peak=optimizer.learning_rate,
        num_warmup_steps=warmup_steps(num_steps, optimizer.warmup_ratio),
        num_steps=num_steps,
        min_ratio=optimizer.min_learning_rate_ratio,
    )


def _precision(config: Config, is_trained: bool) -> Precision:
    dtype = dtype_of(config)
    if dtype != "bf16":
        return dtype
    # Weights that are not trained need no fp32 copy: nothing is added to them.
    return "bf16_master" if config.train.fp32_master and is_trained else "bf16"


def engine_dtype(config: Config) -> str:
    return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[dtype_of(config)]


def are_adapters_alone(config: Config, on_gpu: bool) -> bool:
    """Tell whether engines get adapters without the other weights. Raises if vLLM could not apply them."""
    if config.rollout.lora_sync == "merged":
        return False
    problem = vllm_versions.adapter_problem(config.train.lora.rank, engine_dtype(config), is_cpu=not on_gpu)
    if problem is not None:
        raise UserError(f"rollout.lora_sync is adapter: {problem}; set it to merged")
    return True


def check_8_bits(config: Config, on_gpu: bool) -> None:
    """Raise if engines cannot have in 8 bits what the config asks for."""
    for key in ("quantization", "kv_cache_dtype"):
        if getattr(config.rollout, key) is not None and dtype_of(config) == "fp32":
            raise UserError(
                f"rollout.{key} is fp8, which is for 16-bit models, and train.dtype is fp32 where there are no devices:"
                " set train.dtype to bf16, or leave it unset"
            )
    if config.rollout.kv_cache_dtype is not None and not on_gpu:
        raise UserError(
            "rollout.kv_cache_dtype is fp8, which vLLM has on GPUs alone, and there are none: leave it unset"
        )


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
    assert config.actor.model is not None
    rollout = config.rollout
    vllm = VllmSettings(
        tensor_parallel_size=rollout.tensor_parallel_size,
        memory_share=rollout.memory_share if limit is None else limit.share,
        cache_gib=None if limit is None else limit.gib,
        prefix_caching=rollout.prefix_caching,
        enforce_eager=rollout.enforce_eager,
        logs=str(logs),
        engine_args=rollout.engine_args,
        lora=lora_options(config) if adapters_alone else None,
        images=_image_options(config),
        fp8_weights=rollout.quantization is not None,
        fp8_cache=rollout.kv_cache_dtype is not None,
    )
    return EngineSettings(
        model=config.actor.model,
        max_length=config.data.max_length,
        num_slots=num_slots or engine_slots(config),
        eos_token_ids=eos_token_ids,
        dtype=engine_dtype(config),
        num_threads=config.cluster.threads_per_process,
        trust_remote_code=config.trust_remote_code,
        fp32_head=rollout.fp32_head,
        num_kept_prompts=KEPT_PROMPTS + engine_slots(config) - (num_slots or engine_slots(config)),
        keeps_cache=config.overlap.in_flight == "keep",
        is_deterministic=config.train.full_determinism,
        vllm=vllm if rollout.engine == "vllm" else None,
    )


def _image_options(config: Config) -> vllm_engine.ImageOptions | None:
    """Return bounds on the images of requests; None if no images were prepared for this config."""
    largest = largest_image(config)
    if config.data.image_key is None or not largest.exists():
        return None
    return vllm_engine.ImageOptions(config.data.max_images_per_prompt, str(largest))


def judge_engine_settings(
    config: Config, eos_token_ids: tuple[int, ...], logs: Path, *, limit: CacheLimit | None = None
) -> EngineSettings:
    """Return the settings of the judge's engines. `logs`: the folder for their logs. `limit`: of their caches."""
    judge, engine = config.reward.judge, config.reward.judge.engine
    assert judge.model is not None
    vllm = VllmSettings(
        tensor_parallel_size=engine.tensor_parallel_size,
        memory_share=engine.memory_share if limit is None else limit.share,
        cache_gib=None if limit is None else limit.gib,
        prefix_caching=True,  # the votes on an answer are the same request, and all requests begin with the rubric
        enforce_eager=engine.enforce_eager,
        logs=str(logs),
        role="judge",
    )
    return EngineSettings(
        model=judge.model,
        max_length=judge_length(config),
        num_slots=engine_slots(config, "judge"),
        eos_token_ids=eos_token_ids,
        dtype=engine_dtype(config),
        num_threads=config.cluster.threads_per_process,
        trust_remote_code=config.trust_remote_code,
        is_deterministic=config.train.full_determinism,
        vllm=vllm if engine.kind == "vllm" else None,
    )


def component_settings(config: Config, plan: Plan) -> list[ComponentSettings]:
    """Return the components of the user's own, in the order in which the flow has them work."""
    return [
        ComponentSettings(role, absolute(config.components[role].path), config.components[role].kwargs)
        for role in plan.flow.roles
        if role in config.components
    ]


def host_settings(config: Config, run_dir: Path | None) -> HostSettings:
    """Return the settings of rollout hosts. run_dir: of the run; None where nothing is trained."""
    assert config.actor.model is not None
    timeout_s, retries = reward_limits(config)
    is_kept = run_dir is not None and config.log.keep_rollouts
    is_spooled = is_kept or (run_dir is not None and config.overlap.staleness > 0)
    folder = Path() if run_dir is None else run_dir.absolute()
    return HostSettings(
        tokenizer=config.actor.model,
        run_seed=config.seed,
        max_length=config.data.max_length,
        agent=config.agent.path,
        programs=program_settings(config),
        max_turns=config.agent.max_steps,
        max_concurrent=episodes_per_engine(config),
        episode_timeout_s=config.agent.timeout_s,
        deadlines=Deadlines(
            config.agent.turn_timeout_s, config.agent.tool_timeout_s, config.agent.on_timeout == "score"
        ),
        reward=config.reward.function,
        eval_reward=config.eval.reward,
        reward_timeout_s=timeout_s,
        reward_retries=retries,
        reward_max_bytes=None if config.reward.max_memory_gib is None else int(config.reward.max_memory_gib * 2**30),
        reward_urls=tuple(as_list(config.reward.url)),
        reward_token=bearer_token() if config.reward.url is not None else None,
        reward_max_open=config.reward.max_open_requests,
        has_reward_model=has_reward_model(config),
        reward_tokenizer=config.reward.model if config.reward.retokenize else None,
        trust_remote_code=config.trust_remote_code,
        graders=graders_of(config),
        eval_graders=eval_graders_of(config),
        judge=judge_of(config, run_dir),
        sandbox=sandbox_of(config),
        simulation=simulation_settings(config) if has_simulator(config) else None,
        spool=str(folder / SPOOL) if is_spooled else None,
        kept_rollouts=str(folder / ROLLOUTS) if is_kept else None,
        images=_host_images(config, run_dir),
        notes=str(folder / NOTES) if run_dir is not None and config.cluster.runtime == "ray" else None,
    )


def image_limits(config: Config) -> ImageLimits:
    """Return the bounds on images."""
    data = config.data
    return ImageLimits(data.max_images_per_prompt, data.max_image_bytes, data.max_image_pixels)


def _host_images(config: Config, run_dir: Path | None) -> HostImages | None:
    """Return the settings of images that environments and programs show; None if none can."""
    if config.data.image_key is None or not has_agent(config):
        return None
    options = _image_options(config) if config.rollout.engine == "vllm" else None
    of_data = image_folder(config)
    return HostImages(
        folder=str(of_data if run_dir is None else run_dir.absolute() / EPISODE_IMAGES),
        data_folder=str(of_data),
        limits=image_limits(config),
        trust_remote_code=config.trust_remote_code,
        largest=None if options is None else options.largest,
    )


def simulation_settings(config: Config) -> SimulationSettings:
    """Return the settings of the simulators of one rollout host."""
    env = config.env
    assert env.path is not None
    return SimulationSettings(
        simulator=SimulatorSettings(absolute_file(env.path), tuple(env.tasks), env.max_steps, env.kwargs),
        num_envs=env.num_envs,
        num_stages=config.rollout.pipeline_stage_num,
        num_processes=env.num_processes,
        chunk=env.chunk,
        bins=env.bins,
        timeout_s=env.step_timeout_s,
        is_success_rewarded=env.reward == "success",
        # Groups compare whole episodes: their turns, which are of different worlds, have nothing in common.
        has_turn_rewards=estimator_entry(config.algorithm.estimator).places_turn_rewards,
        has_action_rewards=config.algorithm.time_step != "chunk",
        bootstraps=has_critic(config),
        images_for=config.actor.model if env.images else None,
        num_films=env.films,
        trust_remote_code=config.trust_remote_code,
    )


def absolute_file(path: str) -> str:
    """Return a file's path as any process finds it; the name of a family stays."""
    return str(Path(path).expanduser().absolute()) if path.endswith(".py") else path


def program_settings(config: Config) -> ProgramSettings:
    """Return the settings of agents that are programs."""
    agent = config.agent
    return ProgramSettings(
        command=None if agent.command is None else tuple(agent.command),
        sampling=agent.sampling,
        history=agent.history,
        chat_template=chat_template_text(config.data.chat_template),
        tool_parser=agent.tool_parser,
        bind=agent.gateway.bind,
        advertise_url=agent.gateway.advertise_url,
        passed_on=tuple(agent.pass_env),
        containers=agent.containers,
        run_seed=config.seed,
        environment=environment_settings(config),
    )


def environment_settings(config: Config) -> EnvironmentSettings | None:
    """Return what plays the episodes in processes of its own; None if nothing does."""
    agent = config.agent
    return settings_of(
        family=agent.environment.family,
        name=agent.environment.name,
        arguments=agent.environment.arguments,
        file=agent.path,
        python=agent.python,
        num_processes=agent.environment.num_processes,
    )


def policy_settings(
    config: Config, optimizer_steps: int, kl_coefficient: float, version: int | None = None
) -> PolicySettings:
    """Return how the actor learns from a rollout. version: of the weights that learn, to measure the lag of tokens."""
    version = version if config.overlap.staleness > 0 else None
    algorithm, correction, reward = config.algorithm, config.algorithm.correction, config.reward
    kind = correction_kind(config)
    kl_in_reward = 0.0 if algorithm.kl.as_loss else kl_coefficient
    return PolicySettings(
        objective=PolicyObjective(
            ratio=absolute(algorithm.policy_loss),
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            dual_clip=algorithm.dual_clip,
            correction=None if kind == "none" or kind == "rollout-ratio" else kind,
            correction_low=correction.low,
            correction_high=correction.high,
            rejection=correction.reject,
            rejection_low=correction.reject_low,
            rejection_high=correction.reject_high,
            kl_estimator=kl_estimator(config),
            kl_coefficient=kl_coefficient if algorithm.kl.as_loss else 0.0,
            entropy_coefficient=algorithm.entropy_coef,
            ratio_to="rollout" if kind == "rollout-ratio" else "old",
            max_lag=0 if version is None else config.overlap.staleness,
        ),
        advantages=AdvantageSettings(
            estimator=absolute(algorithm.estimator),
            gamma=algorithm.gamma,
            gae_lambda=algorithm.gae_lambda,
            divide_by_std=algorithm.std_norm,
            over_batch=algorithm.batch_norm,
            reward_clip=reward.clip,
            kl_in_reward=kl_in_reward,
            kl_estimator=kl_estimator(config),
            overlong_buffer=reward.overlong.buffer_length,
            overlong_factor=reward.overlong.penalty_factor,
            truncation_penalty=reward.truncation_penalty,
            max_sampled=max_sampled_tokens(config),
            distill_coefficient=algorithm.distill_coef,
            time_step=algorithm.time_step,
            ratio_step=ratio_step(config),
            turn_credit=algorithm.turn_credit,
        ),
        aggregation=aggregation(config),
        mask_truncated=algorithm.mask_truncated,
        normalises_corrections=correction.normalise,
        max_epochs=config.train.max_epochs,
        # With one optimizer step per rollout the ratio is exactly one, and the old log-probs are the current ones.
        needs_old_log_probs=(
            optimizer_steps > 1
            or kl_in_reward > 0
            or is_filtered(config)
            or has_inference(config)
            or correction.normalise
            or algorithm.distill_coef > 0
        ),
        temperature=config.rollout.temperature,
        score=score_batches(config),
        train=train_batches(config),
        # A sample whose advantage is zero still says something about the balance of experts.
        learns_from_every_sample=algorithm.aux_loss_coef > 0,
        version=version,
    )


def is_filtered(config: Config) -> bool:
    """Tell whether engines sample from a part of the distribution: their log-probs are then not the policy's."""
    return config.rollout.top_p < 1 or config.rollout.top_k > 0


def critic_settings(config: Config) -> CriticSettings:
    return CriticSettings(
        ValueObjective(config.critic.value_clip),
        config.train.max_epochs,
        score_batches(config),
        train_batches(config),
        config.algorithm.time_step,
    )


def reward_settings(config: Config) -> RewardSettings:
    return RewardSettings(score_batches(config), reward_scale(config))


def score_batches(config: Config) -> BatchSettings:
    return _batches(config, config.rollout)


def train_batches(config: Config) -> BatchSettings:
    return _batches(config, config.train)


def _batches(config: Config, section: TrainConfig | RolloutConfig) -> BatchSettings:
    max_tokens = tokens_per_micro_batch(config, token_budget(section))
    size = None if section.micro_batch_size == "auto" else section.micro_batch_size
    return BatchSettings(
        size,
        max_tokens,
        is_padded=not config.train.packing,
        is_chosen=is_auto(section),
        num_devices=config.train.sequence_parallel_size,
    )


def weight_transports(config: Config, plan: Plan, is_cuda: bool, role: str = "rollout") -> TransportPlan:
    """Return how weights travel to each engine, or to each process of another role that receives them."""
    actor = [process.devices for process in plan.role("actor").processes]
    receivers = [process.devices for process in plan.role(role).processes]
    if config.cluster.runtime == "local" and is_cuda:
        receivers = [actor[0]] * len(
            receivers
        )  # In one process all roles have the same device, whatever the plan says.
    return choose_transports(actor, receivers, is_cuda, config.rollout.weight_transport)
