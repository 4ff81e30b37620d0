"""Makes settings of what samples and scores: engines, rollout hosts, simulators, rewards, components."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

from hotseat.agents import Deadlines, ProgramSettings
from hotseat.agents.environments.families import EnvironmentSettings
from hotseat.config import Config
from hotseat.config.chat_template import chat_template_text
from hotseat.config.image_paths import image_folder, largest_image
from hotseat.config.precision import dtype_of
from hotseat.config.presence import (
    has_agent,
    has_critic,
    has_judge,
    has_reward_model,
    has_simulator,
    has_teacher_alone,
)
from hotseat.config.resolved import judge_length, max_new_tokens, sends_adapters_alone, source_of
from hotseat.config.urls import as_list
from hotseat.data.images import ImageLimits
from hotseat.envs.family_loading import SimulatorSettings
from hotseat.errors import UserError
from hotseat.loop.settings.training_settings import lora_options
from hotseat.loop.state.run_dir import EPISODE_IMAGES, LOGS, NOTES, ROLLOUTS, SPOOL
from hotseat.loop.workers.component import ComponentSettings
from hotseat.loop.workers.host_settings import HostImages, HostSettings, ScorerSettings
from hotseat.loop.workers.observations import SimulationSettings
from hotseat.placement import Plan
from hotseat.planning.config_plan import EngineRoom, episodes_per_engine
from hotseat.planning.role_specs import TEACHER_SLOTS, engine_of, engine_slots
from hotseat.registry.engines import engine_entry
from hotseat.registry.estimators import estimator_entry
from hotseat.rewards.addresses import bearer_token
from hotseat.rewards.rubrics import TOKEN, JudgeEngine, JudgeSettings
from hotseat.rollout.kinds import EngineOptions, EngineSettings, ImageOptions, engine_kind
from hotseat.types import Sampling
from hotseat.user_functions import absolute

VERDICTS = "judge.jsonl"


def rollout_sampling(config: Config) -> Sampling:
    rollout = config.rollout
    return Sampling(
        max_new_tokens=max_new_tokens(config),
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=tuple(as_list(rollout.stop)),
    )


def eval_sampling(config: Config) -> Sampling:
    stop = tuple(as_list(config.rollout.stop))
    return Sampling(max_new_tokens=max_new_tokens(config), temperature=config.eval.temperature, stop=stop)


def engine_dtype(config: Config) -> str:
    return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[dtype_of(config)]


def are_adapters_alone(config: Config, on_gpu: bool) -> bool:
    """Tell whether engines get adapters without the other weights. Raises if these could not apply them."""
    if not sends_adapters_alone(config):
        return False
    kind = engine_kind(config.rollout.engine)
    problem = kind.adapter_problem(config.train.lora.rank, engine_dtype(config), is_cpu=not on_gpu)
    if problem is not None:
        if config.train.load_in_4bit:
            raise UserError(f"train.load_in_4bit: {problem}, and nothing can be merged into 4 bits: unset it")
        raise UserError(f"rollout.lora_sync is adapter: {problem}; set it to merged")
    return True


def engine_settings(
    config: Config,
    eos_token_ids: tuple[int, ...],
    logs: Path,
    *,
    room: EngineRoom | None = None,
    adapters_alone: bool = False,
    num_slots: int | None = None,
) -> EngineSettings:
    """Return the settings of the rollout engines. `logs`: the folder for their logs. `room`: the memory of each.

    num_slots: sequences that one engine decodes at a time; None: what the config says. Where it is fewer, prompts are
    kept in the room of the others: of simulators that an action did not change, and that are asked for again.
    """
    rollout, all_slots = config.rollout, engine_slots(config)
    num_slots = num_slots or all_slots
    lora = lora_options(config) if adapters_alone else None
    options = EngineOptions(
        tensor_parallel_size=rollout.tensor_parallel_size,
        memory_share=rollout.memory_share if room is None else room.share,
        cache_gib=None if room is None else room.cache_gib,
        prefix_caching=rollout.prefix_caching,
        enforce_eager=rollout.enforce_eager,
        logs=str(logs),
        engine_args=rollout.engine_args,
        adapter_rank=0 if lora is None else lora.rank,
        adapter_targets=() if lora is None else lora.target_modules,
        images=image_options(config),
        fp8_weights=rollout.quantization is not None,
        has_nf4=config.train.load_in_4bit,
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
        returns_routing=rollout.routing_replay,
        engine=rollout.engine,
        options=options,
    )


def judge_engine_settings(
    config: Config, eos_token_ids: tuple[int, ...], logs: Path, *, room: EngineRoom | None = None
) -> EngineSettings:
    """Return the settings of the judge's engines. `logs`: the folder for their logs. `room`: the memory of each."""
    judge, engine = config.reward.judge, config.reward.judge.engine
    options = EngineOptions(
        tensor_parallel_size=engine.tensor_parallel_size,
        memory_share=engine.memory_share if room is None else room.share,
        cache_gib=None if room is None else room.cache_gib,
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


def teacher_engine_settings(config: Config, logs: Path) -> EngineSettings | None:
    """Return the settings of a teacher's engines; None if its model is behind a training backend."""
    reference, top_k = config.reference, config.algorithm.distill.top_k
    if reference.engine is None:
        return None
    assert top_k is not None
    # It reads whole texts and samples nothing, for which graphs are of no use.
    options = EngineOptions(enforce_eager=True, logs=str(logs), role="reference", num_likely=top_k)
    return EngineSettings(
        model=source_of(config, reference.model),
        max_length=config.data.max_length,
        num_slots=TEACHER_SLOTS,
        eos_token_ids=(),
        dtype=engine_dtype(config),
        num_threads=config.cluster.threads_per_process,
        is_deterministic=config.train.full_determinism,
        engine=reference.engine,
        options=options,
    )


def image_options(config: Config) -> ImageOptions | None:
    """Return bounds on the images of requests; None if no images were prepared for this config."""
    largest = largest_image(config)
    if config.data.image_key is None or not largest.exists():
        return None
    return ImageOptions(config.data.max_images_per_prompt, str(largest))


def component_settings(config: Config, plan: Plan) -> list[ComponentSettings]:
    """Return the custom components, in the order in which the flow has them work."""
    return [
        ComponentSettings(role, absolute(config.components[role].path), config.components[role].kwargs)
        for role in plan.flow.roles
        if role in config.components
    ]


def host_settings(config: Config, run_dir: Path | None) -> HostSettings:
    """Return the settings of rollout hosts. run_dir: of the run; None where nothing is trained."""
    is_kept = run_dir is not None and config.log.keep_rollouts
    is_spooled = is_kept or (run_dir is not None and config.overlap.staleness > 0)
    folder = Path() if run_dir is None else run_dir.absolute()
    return HostSettings(
        tokenizer=source_of(config, config.actor.model),
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
        scorers=scorer_settings(config, run_dir),
        has_reward_model=has_reward_model(config),
        reward_tokenizer=source_of(config, config.reward.model) if config.reward.retokenize else None,
        simulation=simulation_settings(config) if has_simulator(config) else None,
        spool=str(folder / SPOOL) if is_spooled else None,
        kept_rollouts=str(folder / ROLLOUTS) if is_kept else None,
        max_thinking_tokens=config.rollout.max_thinking_tokens,
        logs=None if run_dir is None else str(folder / LOGS),
        crashes=None if run_dir is None else str(folder / LOGS / f"crashes-{secrets.token_hex(4)}"),
        is_own_process=not config.cluster.is_in_process,
        images=_host_images(config, run_dir),
        sampled_share=config.algorithm.distill.sampled,
    )


def scorer_settings(config: Config, run_dir: Path | None) -> ScorerSettings:
    """Return the settings of the scorers of rollout hosts. run_dir: of the run; None where nothing is trained."""
    notes = None
    if run_dir is not None:
        notes = str(run_dir.absolute() / NOTES)
    return ScorerSettings(
        reward=config.reward,
        evaluation=config.eval,
        seed=config.seed,
        token=bearer_token() if config.reward.url is not None else None,
        judge=judge_of(config, run_dir),
        is_needed=not has_teacher_alone(config),
        notes=notes,
    )


def image_limits(config: Config) -> ImageLimits:
    data = config.data
    return ImageLimits(data.max_images_per_prompt, data.max_image_bytes, data.max_image_pixels)


def _host_images(config: Config, run_dir: Path | None) -> HostImages | None:
    if config.data.image_key is None or not has_agent(config):
        return None
    options = image_options(config) if engine_entry(config.rollout.engine).is_sized_by_images else None
    of_data = image_folder(config)
    return HostImages(
        folder=str(of_data if run_dir is None else run_dir.absolute() / EPISODE_IMAGES),
        data_folder=str(of_data),
        limits=image_limits(config),
        largest=None if options is None else options.largest,
    )


def simulation_settings(config: Config) -> SimulationSettings:
    env = config.env
    assert env.path is not None
    # A file's path as any process finds it; the name of a family stays.
    path = str(Path(env.path).expanduser().absolute()) if env.path.endswith(".py") else env.path
    return SimulationSettings(
        simulator=SimulatorSettings(path, tuple(env.tasks), env.max_steps, env.kwargs),
        env=env,
        num_stages=config.rollout.pipeline_stage_num,
        # Groups compare whole episodes: their turns, which are of different worlds, have nothing in common.
        has_turn_rewards=estimator_entry(config.algorithm.estimator).places_turn_rewards,
        has_action_rewards=config.algorithm.time_step != "chunk",
        bootstraps=has_critic(config),
        images_for=source_of(config, config.actor.model) if env.images else None,
    )


def program_settings(config: Config) -> ProgramSettings:
    agent = config.agent
    return ProgramSettings(
        command=None if agent.command is None else tuple(agent.command),
        sampling=agent.sampling,
        history=agent.history,
        chat_template=chat_template_text(config.data.chat_template),
        chat_template_kwargs=config.data.chat_template_kwargs,
        tool_parser=agent.tool_parser,
        bind=agent.gateway.bind,
        advertise_url=agent.gateway.advertise_url,
        passed_on=tuple(agent.pass_env),
        containers=agent.containers,
        preload=tuple(agent.preload),
        run_seed=config.seed,
        environment=environment_settings(config),
    )


def environment_settings(config: Config) -> EnvironmentSettings | None:
    """Return the environments that play episodes in their own processes; None if there are none."""
    agent, environment = config.agent, config.agent.environment
    if environment.family is None and (agent.python is None or agent.path is None):
        return None
    return EnvironmentSettings(
        environment.family,
        environment.name,
        json.dumps(dict(environment.arguments)),
        None if environment.family is not None else agent.path,
        agent.python,
        environment.num_processes,
    )


def judge_of(config: Config, run_dir: Path | None) -> JudgeSettings | None:
    """Return the settings of the run's judge; None without one. run_dir: for the file of verdicts."""
    judge = config.reward.judge
    if not has_judge(config):
        return None
    assert judge.rubric is not None
    assert judge.model is not None
    usual = 0.0 if judge.votes == 1 else 1.0
    return JudgeSettings(
        urls=tuple(as_list(judge.url)),
        model=judge.model,
        rubric=Path(judge.rubric).expanduser().read_text(encoding="utf-8"),
        name=judge.name,
        weight=judge.weight,
        pattern=judge.pattern,
        scale=judge.scale,
        choices={word.lower(): verdict for word, verdict in (judge.choices or {}).items()},
        votes=judge.votes,
        combine=judge.combine,
        temperature=usual if judge.temperature is None else judge.temperature,
        max_tokens=judge.max_tokens,
        request=judge.request,
        timeout_s=judge.timeout_s,
        retries=judge.retries,
        max_open=judge.max_open_requests,
        token=bearer_token(name=TOKEN) if judge.url is not None else None,
        engine=(
            JudgeEngine(source_of(config, judge.model), judge_length(config), engine_slots(config, "judge"))
            if judge.url is None
            else None
        ),
        cache=None if run_dir is None else str(run_dir.absolute() / VERDICTS),
    )
