"""Conflicts of `agent` and `env`: who plays the episodes."""

from __future__ import annotations

from hotseat.config.annotations import RL
from hotseat.config.conflicts.conflict_list import Problems, conflict
from hotseat.config.presence import has_simulator, task_numbers
from hotseat.config.schema import Config


@conflict(RL)
def address_of_the_gateway(config: Config) -> Problems:
    bind, url = config.agent.gateway.bind, config.agent.gateway.advertise_url
    host, _, port = bind.rpartition(":")
    if host and ":" not in host and not (port.isdecimal() and int(port) < 65536):
        yield "agent.gateway.bind", f"{bind!r}: write it as 127.0.0.1 or as 127.0.0.1:8000"
    if url is not None and not url.startswith(("http://", "https://")):
        yield "agent.gateway.advertise_url", f"{url!r}: write it as http://gateway.example:8000"
    elif url is not None and not (host and port.isdecimal()):
        yield (
            "agent.gateway.bind",
            f"{bind!r} takes any free port, which agent.gateway.advertise_url cannot name: write it as 0.0.0.0:8000",
        )


@conflict(RL)
def one_address_of_several_hosts(config: Config) -> Problems:
    if config.agent.gateway.advertise_url is not None and config.rollout.num_hosts != 1:
        yield (
            "rollout.num_hosts",
            "agent.gateway.advertise_url is one address, and each rollout host knows only the episodes of its own: set"
            " rollout.num_hosts to 1",
        )


@conflict()
def tasks_without_environment(config: Config) -> Problems:
    for key, path in (("data.path", config.data.path), ("eval.path", config.eval.path)):
        try:
            numbers = task_numbers(path)
        except ValueError as error:
            yield key, str(error)
            continue
        if numbers is not None and config.agent.environment.family is None:
            yield key, f"{path}: there is no environment; set agent.environment.family"


@conflict(RL)
def several_players(config: Config) -> Problems:
    agent = config.agent
    if agent.path is not None and agent.environment.family is not None:
        yield "agent.environment", f"agent.path is {agent.path}: an episode is played by one of the two"
    if agent.command is not None and agent.environment.family is not None:
        yield "agent.command", "agent.environment is set: an episode is played by one of the two"
    if agent.command is not None and agent.path is not None:
        yield "agent.command", f"agent.path is {agent.path}: an episode is played by one of the two"
    for key, player in (
        ("agent.path", agent.path),
        ("agent.command", agent.command),
        ("agent.environment.family", agent.environment.family),
    ):
        if player is not None and has_simulator(config):
            yield key, "env.path is set too: an episode is played by an agent or in a simulator"


@conflict(RL)
def empty_command(config: Config) -> Problems:
    command = config.agent.command
    if command is not None and (not command or not command[0]):
        yield "agent.command", "empty: give a program and its arguments, as [python, agent.py]"


@conflict(RL)
def rendered_prompts_for_programs(config: Config) -> Problems:
    is_program = config.agent.command is not None or config.agent.environment.family is not None
    if is_program and config.data.apply_chat_template:
        yield (
            "data.apply_chat_template",
            "true: a program gets the prompt as it is in the data, and the gateway renders the messages it sends; set"
            " it to false",
        )


@conflict(RL)
def uneven_stages(config: Config) -> Problems:
    stages, num_envs = config.rollout.pipeline_stage_num, config.env.num_envs
    if has_simulator(config) and num_envs % stages:
        yield "rollout.pipeline_stage_num", f"{stages} stages do not divide env.num_envs {num_envs} evenly"


@conflict(RL)
def simulators_that_run_ahead(config: Config) -> Problems:
    if not has_simulator(config) or config.overlap.staleness == 0:
        return
    if config.overlap.in_flight == "recompute":
        yield (
            "overlap.in_flight",
            "recompute: simulators do not stand still while training has their devices; set it to wait, keep or"
            " restart, and place env and rollout on devices of their own",
        )
    if config.env.enable_offload:
        yield (
            "env.enable_offload",
            "true: with overlap.staleness above 0 simulators stay on their devices; unset it",
        )
