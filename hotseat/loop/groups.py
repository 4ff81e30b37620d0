"""Starts the processes of a reinforcement run: one group per role, on the devices that the plan gives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotseat import faults
from hotseat.cluster import Cluster, Group
from hotseat.config import Config
from hotseat.config.roles import has_critic, has_inference, has_reference, has_reward_model
from hotseat.loop import settings
from hotseat.loop.host import HostSettings, RolloutHost
from hotseat.loop.planning import are_devices_logical
from hotseat.loop.revival import start_up
from hotseat.loop.value_models import critic_model
from hotseat.loop.value_workers import CriticWorker, RewardWorker
from hotseat.loop.workers import ActorWorker, EngineWorker, InferenceWorker, ModelWorker
from hotseat.placement import Plan


@dataclass(frozen=True)
class Groups:
    """The running roles. `seated` are those that the plan gives devices, by name."""

    engines: Group
    actor: Group
    hosts: Group
    critic: Group | None
    reference: Group | None
    reward: Group | None
    inference: Group | None
    seated: dict[str, Group]
    measures_its_device: bool  # an engine that starts takes a share of what it finds free on its device


def launch_groups(
    config: Config,
    plan: Plan,
    schedule_length: int,
    cluster: Cluster,
    eos_token_ids: tuple[int, ...],
    logs: Path,
    say: Callable[[str], object],
    say_fault: Callable[[str], object],
) -> Groups:
    """All of them, ready and connected. They start together, unless engines have to measure their devices first."""
    seated: dict[str, Group] = {}

    def launch(role: str, cls: type, *args: Any) -> Group:
        seated[role] = cluster.launch(
            role,
            cls,
            args=args,
            processes=plan.role(role).processes,
            num_threads=config.cluster.threads_per_process,
            timeout_s=config.cluster.call_timeout_s,
            wait=False,
        )
        return seated[role]

    trust = config.trust_remote_code
    engines = launch("rollout", EngineWorker, settings.engine_settings(config, eos_token_ids, logs))
    # vLLM sizes its cache by what it finds on its device: nobody else may come or go there meanwhile.
    measures_its_device = config.rollout.engine == "vllm" and not are_devices_logical(cluster)
    if measures_its_device:
        start_up(engines, say_fault)
        for device in sorted({d for process in plan.role("rollout").processes for d in process.devices}):
            memory = cluster.device_memory(device)
            if memory is not None:
                say(f"device {device}: {memory.used / 2**30:.1f} GiB in use after the engines started")
    options = settings.train_options(config, schedule_length)
    actor = launch("actor", ActorWorker, config.actor.model, options, settings.engine_dtype(config), trust)
    critic = reference = reward = inference = None
    if has_critic(config):
        options = settings.critic_options(config, schedule_length)
        critic = launch("critic", CriticWorker, critic_model(config), options, trust)
    if has_reference(config):
        options = settings.train_options(config, schedule_length, is_trained=False)
        reference = launch("reference", ModelWorker, config.reference.model or config.actor.model, options, trust)
    if has_reward_model(config):
        reward = launch("reward", RewardWorker, config.reward.model, settings.reward_options(config), trust)
    if has_inference(config):
        options = settings.train_options(config, schedule_length, is_trained=False)
        dtype = settings.engine_dtype(config)
        inference = launch("inference", InferenceWorker, config.actor.model, options, dtype, trust)
    hosts = cluster.launch(
        "agents",
        RolloutHost,
        args=(_host_settings(config),),
        timeout_s=config.cluster.call_timeout_s,
        wait=False,
    )
    faults.reach("start-up")
    for group in (engines, hosts):
        start_up(group, say_fault)
    for group in seated.values():
        group.ready()
    hosts.call("connect", engines)
    return Groups(engines, actor, hosts, critic, reference, reward, inference, seated, measures_its_device)


def _host_settings(config: Config) -> HostSettings:
    assert config.actor.model is not None
    return HostSettings(
        tokenizer=config.actor.model,
        run_seed=config.seed,
        max_length=config.data.max_length,
        agent=config.agent.path,
        max_turns=config.agent.max_steps,
        max_concurrent=config.agent.max_concurrent or settings.episodes_per_engine(config),
        episode_timeout_s=config.agent.timeout_s,
        reward=config.reward.function,
        eval_reward=config.eval.reward,
        reward_timeout_s=config.reward.timeout_s,
        reward_retries=config.reward.retries,
        reward_max_bytes=None if config.reward.max_memory_gib is None else int(config.reward.max_memory_gib * 2**30),
        has_reward_model=has_reward_model(config),
        reward_tokenizer=config.reward.model if config.reward.retokenize else None,
        trust_remote_code=config.trust_remote_code,
    )
