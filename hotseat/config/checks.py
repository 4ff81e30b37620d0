"""Rules between fields.

`no_effect` finds options that were set but can change nothing. `conflicts` finds values that contradict each other.
`missing` finds required options that are unset; a config may be planned, explained and printed before it is complete.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import get_args

from hotseat.config.images import has_images, image_conflicts
from hotseat.config.resolved import (
    STEPS,
    correction_kind,
    is_batch_normalised,
    max_sampled_tokens,
    overlap_queue,
    ratio_step,
    shortest_kl_horizon,
    uses_k1_loss,
)
from hotseat.config.roles import (
    ESTIMATORS_WITH_GROUP,
    compares_with_reference,
    has_agent,
    has_critic,
    has_evaluation,
    has_judge,
    has_judge_engine,
    has_reference,
    has_reward_model,
    has_simulator,
    is_base_reference,
    placed_roles,
    roles_of,
    task_numbers,
)
from hotseat.config.schema import (
    Config,
    CorrectionConfig,
    GraderConfig,
    JudgeEngineConfig,
    OptimizerConfig,
    RoleName,
    RolloutConfig,
    Section,
    tasks_of,
)
from hotseat.config.urls import as_list, url_problems
from hotseat.registry.backends import BACKENDS, backend_entry
from hotseat.registry.engines import EngineEntry, engine_entry, with_option


@dataclass(frozen=True)
class Rule:
    """A condition under which keys have an effect, in the tasks that the schema gives them.

    keys: dotted; a section covers all below it. matters: the condition. because: says why the keys have no effect.
    """

    keys: tuple[str, ...]
    matters: Callable[[Config], bool]
    because: Callable[[Config], str]

    def covers(self, key: str) -> bool:
        return any(key == rule_key or key.startswith(rule_key + ".") for rule_key in self.keys)


def _has_reward_file(config: Config) -> bool:
    return config.reward.function is not None or config.eval.reward is not None


def _says(text: str) -> Callable[[Config], str]:
    return lambda _: text


def _optimizer_rules(role: str, optimizer: Callable[[Config], OptimizerConfig]) -> tuple[Rule, ...]:
    at = f"{role}.optimizer"
    return (
        Rule((f"{at}.muon",), lambda c: optimizer(c).kind == "muon", _says(f"{at}.kind is adamw")),
        Rule(
            (f"{at}.min_learning_rate_ratio",),
            lambda c: optimizer(c).schedule != "constant",
            _says(f"{at}.schedule is constant"),
        ),
    )


def _engine_rules(
    at: str, section: type[Section], key: str, is_idle: Callable[[Config], bool] = lambda c: False
) -> tuple[Rule, ...]:
    """Make rules for the options of a section that not every engine has. is_idle: another rule covers the section."""

    def entry(config: Config) -> EngineEntry:
        return engine_entry(operator.attrgetter(f"{at}.{key}")(config))

    def rule(options: list[str]) -> Rule:
        return Rule(
            tuple(f"{at}.{option}" for option in options),
            lambda c: is_idle(c) or options[0] in entry(c).options,
            lambda c: f"{at}.{key} is {entry(c).without(options[0])}",
        )

    owners: dict[tuple[str, ...], list[str]] = {}
    for option in sorted(section.model_fields):
        owners.setdefault(tuple(each.name for each in with_option(option)), []).append(option)
    return tuple(rule(options) for names, options in owners.items() if names)


def _for_losses(name: str, *losses: str) -> Rule:
    """Return the rule of an option that only some losses of preferences have."""
    return Rule(
        (f"algorithm.dpo.{name}",),
        lambda c: c.algorithm.dpo.loss in losses,
        lambda c: f"algorithm.dpo.loss is {c.algorithm.dpo.loss}; this is for {' and '.join(losses)}",
    )


RULES: tuple[Rule, ...] = (
    Rule(
        ("critic", "checkpoint.export_critic"),
        has_critic,
        lambda c: f"algorithm.estimator is {c.algorithm.estimator}, which has no critic; only gae has one",
    ),
    Rule(
        ("reference",),
        lambda c: c.task != "rl" or has_reference(c),
        _says("algorithm.kl.coef is 0, so there is no reference model"),
    ),
    Rule(
        ("reference", "algorithm.dpo.precompute"),
        lambda c: c.task != "dpo" or compares_with_reference(c),
        lambda c: f"algorithm.dpo.loss {c.algorithm.dpo.loss} has no reference",
    ),
    Rule(
        ("reference",),
        lambda c: not is_base_reference(c),
        _says("train.lora.rank is above 0 and reference.model is not set: the model without adapters is the reference"),
    ),
    Rule(
        ("reference.enable_offload",),
        lambda c: not c.algorithm.dpo.precompute,
        _says("algorithm.dpo.precompute is true, so the reference is needed only before training"),
    ),
    _for_losses("label_smoothing", "dpo"),
    _for_losses("length_normalised", "ipo"),
    _for_losses("gamma", "simpo"),
    _for_losses("nll_coef", "dpo", "ipo", "simpo"),
    Rule(
        (
            "algorithm.kl.target",
            "algorithm.kl.horizon",
            "algorithm.kl.estimator",
            "algorithm.kl.as_loss",
            "algorithm.kl.allow_k1_loss",
        ),
        lambda c: c.algorithm.kl.coef > 0,
        _says("algorithm.kl.coef is 0"),
    ),
    Rule(
        ("algorithm.kl.horizon",),
        lambda c: c.algorithm.kl.target is not None,
        _says("algorithm.kl.target is not set, so the coefficient does not adapt"),
    ),
    Rule(
        ("algorithm.kl.allow_k1_loss",),
        uses_k1_loss,
        _says("algorithm.kl.estimator is not k1, or algorithm.kl.as_loss is false"),
    ),
    Rule(
        ("reward.normalize", "reward.retokenize", "reward.enable_offload", "reward.shape", "reward.value_head_prefix"),
        has_reward_model,
        _says("rewards do not come from a model (reward.model is not set)"),
    ),
    Rule(
        ("reward.timeout_s", "reward.retries"),
        lambda c: _has_reward_file(c) or c.reward.url is not None,
        _says("rewards come neither from reward.function nor from reward.url"),
    ),
    Rule(
        ("reward.max_open_requests",),
        lambda c: c.reward.url is not None,
        _says("rewards do not come from reward.url"),
    ),
    Rule(
        ("reward.max_memory_gib",),
        lambda c: _has_reward_file(c) or bool(c.reward.graders or c.eval.graders),
        _says("rewards come neither from reward.function nor from reward.graders"),
    ),
    Rule(
        ("reward.trial_timeout_s",),
        _has_reward_file,
        _says("rewards do not come from reward.function"),
    ),
    Rule(
        ("reward.judge",),
        has_judge,
        _says("reward.judge.rubric is not set, so no model judges"),
    ),
    Rule(
        ("reward.judge.engine",),
        lambda c: not has_judge(c) or has_judge_engine(c),
        _says("reward.judge.url is set, so the judge runs elsewhere"),
    ),
    Rule(
        ("reward.judge.request", "reward.judge.retries", "reward.judge.max_open_requests"),
        lambda c: not has_judge_engine(c),
        _says("reward.judge.url is not set, so the judge runs on an engine of the run's own"),
    ),
    *_engine_rules("reward.judge.engine", JudgeEngineConfig, "kind", lambda c: not has_judge_engine(c)),
    Rule(
        ("reward.judge.combine",),
        lambda c: not has_judge(c) or c.reward.judge.votes > 1,
        _says("reward.judge.votes is 1"),
    ),
    Rule(
        ("reward.sandbox",),
        lambda c: any(grader.kind == "code" for grader in (*c.reward.graders, *c.eval.graders)),
        _says("no grader of reward.graders runs code (kind: code)"),
    ),
    Rule(
        ("algorithm.gamma",),
        lambda c: c.algorithm.estimator in ("gae", "reinforce"),
        lambda c: f"algorithm.estimator {c.algorithm.estimator} does not discount; gae and reinforce do",
    ),
    Rule(
        ("algorithm.turn_credit",),
        has_agent,
        _says("none of agent.path, agent.command and agent.environment is set, so an episode has one turn"),
    ),
    Rule(
        ("algorithm.gae_lambda",),
        has_critic,
        lambda c: f"algorithm.estimator is {c.algorithm.estimator}, not gae",
    ),
    Rule(
        ("algorithm.std_norm",),
        lambda c: is_batch_normalised(c) or c.algorithm.estimator == "group_norm",
        lambda c: (
            "algorithm.batch_norm is false"
            if c.algorithm.batch_norm is False
            else f"algorithm.estimator {c.algorithm.estimator} does not divide by a deviation"
        ),
    ),
    Rule(
        ("algorithm.correction.low", "algorithm.correction.high", "algorithm.correction.normalise"),
        lambda c: correction_kind(c) != "none",
        _says("algorithm.correction.kind is none"),
    ),
    Rule(
        ("algorithm.correction.low", "algorithm.correction.high"),
        lambda c: correction_kind(c) != "rollout-ratio",
        _says("algorithm.correction.kind is rollout-ratio, which algorithm.clip_low and clip_high bound"),
    ),
    Rule(
        ("algorithm.correction.normalise",),
        lambda c: correction_kind(c) != "rollout-ratio",
        _says("algorithm.correction.kind is rollout-ratio, which has no weights"),
    ),
    Rule(
        ("algorithm.correction.reject_high",),
        lambda c: c.algorithm.correction.reject is not None,
        _says("algorithm.correction.reject is not set, so no answer is dropped"),
    ),
    Rule(
        ("algorithm.correction.reject_low",),
        lambda c: c.algorithm.correction.reject == "k1",
        _says("algorithm.correction.reject is not k1; the other divergences have no lower bound"),
    ),
    Rule(
        ("algorithm.dual_clip",),
        lambda c: c.algorithm.policy_loss in ("ppo", "gspo"),
        lambda c: f"algorithm.policy_loss is {c.algorithm.policy_loss}; this is for ppo and gspo",
    ),
    Rule(
        ("algorithm.filtering.low", "algorithm.filtering.high"),
        lambda c: c.algorithm.filtering.enabled,
        _says("algorithm.filtering.enabled is false"),
    ),
    Rule(
        ("reward.overlong.penalty_factor",),
        lambda c: c.reward.overlong.buffer_length > 0,
        _says("reward.overlong.buffer_length is 0"),
    ),
    *_optimizer_rules("actor", lambda c: c.actor.optimizer),
    *_optimizer_rules("critic", lambda c: c.critic.optimizer),
    Rule(
        ("train.deepspeed",),
        lambda c: backend_entry(c.train.backend).has_zero_options,
        lambda c: f"train.backend is {c.train.backend}",
    ),
    Rule(
        (
            "train.lora.alpha",
            "train.lora.dropout",
            "train.lora.target_modules",
            "rollout.lora_sync",
        ),
        lambda c: c.train.lora.rank > 0,
        _says("train.lora.rank is 0"),
    ),
    Rule(
        ("train.load_in_4bit",),
        lambda c: c.train.lora.rank > 0,
        _says("train.lora.rank is 0: there are no adapters, so all weights are trained, and none are in 4 bits"),
    ),
    Rule(("train.ema.beta",), lambda c: c.train.ema.enabled, _says("train.ema.enabled is false")),
    Rule(
        ("train.micro_batch_size", "train.chosen_tokens_per_device"),
        lambda c: c.train.max_tokens_per_device is None,
        _says("train.max_tokens_per_device sets the size of micro-batches"),
    ),
    Rule(
        ("rollout.micro_batch_size", "rollout.chosen_tokens_per_device"),
        lambda c: c.rollout.max_tokens_per_device is None,
        _says("rollout.max_tokens_per_device sets the size of micro-batches"),
    ),
    Rule(
        ("train.chosen_tokens_per_device",),
        lambda c: c.train.micro_batch_size == "auto",
        _says("train.micro_batch_size sets the size of micro-batches"),
    ),
    Rule(
        ("rollout.chosen_tokens_per_device",),
        lambda c: c.rollout.micro_batch_size == "auto",
        _says("rollout.micro_batch_size sets the size of micro-batches"),
    ),
    Rule(
        ("train.fp32_master",),
        lambda c: c.train.dtype != "fp32",
        _says("train.dtype is fp32, so the weights are their own masters"),
    ),
    Rule(
        ("rollout.fp32_head",),
        lambda c: c.train.dtype != "fp32",
        _says("train.dtype is fp32, and so are all logits"),
    ),
    *_engine_rules("rollout", RolloutConfig, "engine"),
    Rule(
        ("rollout.weight_transport",),
        lambda c: not _is_on_actor(c, "rollout"),
        _says("rollout is on the actor's devices, where weights are handed over in memory"),
    ),
    Rule(
        ("agent.max_steps", "agent.turn_length", "agent.tool_timeout_s"),
        has_agent,
        _says("none of agent.path, agent.command and agent.environment is set, so an episode has one turn"),
    ),
    Rule(
        ("agent.turn_length",),
        lambda c: not has_simulator(c),
        _says("env.path is set, and a chunk of actions has as many tokens as env.chunk times its numbers"),
    ),
    Rule(
        ("agent.sampling", "agent.history", "agent.tool_parser", "agent.gateway"),
        lambda c: has_agent(c) and not has_simulator(c),
        _says("none of agent.path, agent.command and agent.environment is set, so no program talks to the policy"),
    ),
    Rule(
        ("agent.pass_env",),
        lambda c: c.agent.command is not None or _has_own_process(c),
        _says("no program gets them: neither agent.command nor agent.environment nor agent.python is set"),
    ),
    Rule(
        ("agent.environment.name", "agent.environment.arguments"),
        lambda c: c.agent.environment.family is not None,
        _says("agent.environment.family is not set"),
    ),
    Rule(
        ("agent.environment.num_processes",),
        lambda c: _has_own_process(c),
        _says("neither agent.environment.family nor agent.python is set"),
    ),
    Rule(
        ("agent.python",),
        lambda c: c.agent.environment.family is not None or c.agent.path is not None,
        _says("it runs an agent.environment, or the function play of agent.path: neither is set"),
    ),
    Rule(("agent.containers",), lambda c: c.agent.command is not None, _says("agent.command is not set")),
    Rule(
        ("overlap.queue", "overlap.order", "overlap.in_flight"),
        lambda c: c.overlap.staleness > 0,
        _says("overlap.staleness is 0, so a rollout ends before the training on it begins"),
    ),
    Rule(
        ("data.input_template",),
        lambda c: not c.data.apply_chat_template,
        _says("data.apply_chat_template renders the prompt instead"),
    ),
    Rule(
        ("data.chat_template",),
        lambda c: c.data.apply_chat_template or (c.task == "rl" and has_agent(c)),
        _says("data.apply_chat_template is false"),
    ),
    Rule(("data.probs", "data.split"), lambda c: c.data.path is not None, _says("data.path is not set")),
    Rule(
        (
            "data.max_images_per_prompt",
            "data.max_image_pixels",
            "data.max_image_bytes",
        ),
        lambda c: c.data.image_key is not None,
        _says("data.image_key is not set"),
    ),
    Rule(("train.freeze_visual_encoder",), has_images, _says("data.image_key is not set, and neither is env.images")),
    Rule(
        (
            "eval.split",
            "eval.every",
            "eval.temperature",
            "eval.samples_per_prompt",
            "eval.max_samples",
            "eval.reward",
            "eval.graders",
        ),
        has_evaluation,
        _says("eval.path is not set, so nothing is evaluated (eval=null clears the section)"),
    ),
    Rule(
        tuple(
            f"checkpoint.{name}" for name in ("path", "keep_last", "keep_final", "max_gib", "save_state", "export_each")
        ),
        lambda c: _saves(c) or c.checkpoint.resume,
        _says("checkpoint.every is not set, so no checkpoint is made"),
    ),
    Rule(
        ("checkpoint.background",),
        lambda c: _saves(c),
        _says("checkpoint.every is not set, so no checkpoint is made"),
    ),
    Rule(
        ("checkpoint.allow_changes",),
        lambda c: c.checkpoint.resume,
        _says("checkpoint.resume is false, so the run starts anew"),
    ),
    Rule(("checkpoint.best_metric",), has_evaluation, _says("eval.path is not set")),
    Rule(
        ("log.samples_every",),
        lambda c: c.log.samples_per_step > 0,
        _says("log.samples_per_step is 0, so no sample is recorded"),
    ),
    Rule(
        ("log.wandb.org", "log.wandb.project", "log.wandb.group", "log.wandb.run_name"),
        lambda c: c.log.wandb.enabled,
        _says("log.wandb.enabled is false"),
    ),
    Rule(
        ("log.mlflow.uri", "log.mlflow.experiment", "log.mlflow.run_name"),
        lambda c: c.log.mlflow.enabled,
        _says("log.mlflow.enabled is false"),
    ),
    Rule(
        ("log.trackio.project", "log.trackio.space", "log.trackio.group", "log.trackio.run_name"),
        lambda c: c.log.trackio.enabled,
        _says("log.trackio.enabled is false"),
    ),
    Rule(
        ("env",),
        lambda c: _is_placed(c, "env") or has_simulator(c),
        _says("env.path is not set, and cluster.component_placement places no env"),
    ),
    Rule(
        ("rollout.pipeline_stage_num",),
        lambda c: "env" in roles_of(c),
        _says("env.path is not set, so no simulator is stepped"),
    ),
    Rule(
        ("env.films",),
        lambda c: not (has_simulator(c) and c.env.images),
        _says("env.images is set, and recorded samples have films of what the policy saw"),
    ),
    Rule(
        ("rollout.num_hosts",),
        lambda c: not has_simulator(c),
        _says("with env.path, each process of the role env is a rollout host"),
    ),
    Rule(
        (
            *(f"data.{name}" for name in ("path", "input_key", "label_key", "image_key", "input_template")),
            *(f"data.{name}" for name in ("apply_chat_template", "chat_template", "prompt_max_length")),
            *("data.max_samples", "data.max_lost_fraction", "eval.path", "eval.split", "eval.max_samples"),
        ),
        lambda c: not has_simulator(c),
        _says("env.path is set, and the simulator's tasks and seeds are the prompts"),
    ),
    Rule(
        ("eval.reward", "eval.graders"),
        lambda c: not has_simulator(c),
        _says("env.path is set, and the simulator gives the rewards"),
    ),
    Rule(
        ("rollout.max_new_tokens",),
        lambda c: not has_simulator(c),
        _says("env.path is set, and a chunk of actions has as many tokens as env.chunk times its numbers"),
    ),
    Rule(
        ("inference",),
        lambda c: _is_placed(c, "inference"),
        _says("cluster.component_placement places no inference; the actor computes log-probs"),
    ),
)


def _is_on_actor(config: Config, role: str) -> bool:
    """Return whether the placement says explicitly that a role has the actor's devices."""
    for names, selection in config.cluster.component_placement.items():
        roles = names.replace(" ", "").split(",")
        if role in roles:
            return "actor" in roles or (isinstance(selection, str) and selection.replace(" ", "") == "@actor")
    return not _is_placed(config, role)  # a role that is not placed gets the actor's devices


def _saves(config: Config) -> bool:
    return config.checkpoint.every is not None or config.checkpoint.minutes is not None


def _is_placed(config: Config, role: str) -> bool:
    return role in placed_roles(config)


def no_effect(config: Config, set_keys: Iterable[str]) -> list[tuple[str, str]]:
    """Return (key, reason) of every option in `set_keys` that can change nothing, in their order.

    The schema has the tasks of each key, and `RULES` what else it takes within them.
    """
    idle = [rule for rule in RULES if not rule.matters(config)]
    idle_keys = []
    for key in set_keys:
        tasks = tasks_of(key)
        rule = next((rule for rule in idle if rule.covers(key)), None)
        if config.task not in tasks:
            idle_keys.append((key, f"task is {config.task}; this is for {' or '.join(tasks)}"))
        elif rule is not None:
            idle_keys.append((key, rule.because(config)))
    return idle_keys


def _name_conflicts(config: Config) -> Iterator[tuple[str, str]]:
    key = "cluster.component_names"
    placed = placed_roles(config)
    for name, role in config.cluster.component_names.items():
        if name in get_args(RoleName):
            yield key, f"{name} is a role already: choose another name for {role}"
            continue
        if name in placed:  # the loader replaces names, unless that would name a role twice
            yield key, f"{name} is {role}, which cluster.component_placement places twice: keep one of the two entries"
        for phase in config.flow or ():
            if isinstance(phase.run, dict) and name in phase.run:
                twice = f"{name} is {role}, which it names twice: keep one of the two entries"
                yield "flow", f"phase {phase.name!r}: {twice}"


def _component_conflicts(config: Config) -> Iterator[tuple[str, str]]:
    for name in config.components:
        key = f"components.{name}"
        if name in (*get_args(RoleName), "agents"):
            yield key, f"{name} is the name of processes that every run may have: choose another"
        elif name in config.cluster.component_names:
            role = config.cluster.component_names[name]
            yield key, f"cluster.component_names has {name} for {role}: choose another name for one of them"
        elif not re.fullmatch(r"[A-Za-z_][\w-]*", name):
            yield key, f"{name!r}: begin with a letter, and use letters, digits, '_' and '-'"
        if config.components[name].evaluates and not has_evaluation(config):
            yield f"{key}.evaluates", "true, but nothing is evaluated: remove it, or set eval.path (or env.eval_seeds)"
    if config.components and config.overlap.staleness > 0:
        yield (
            "overlap.staleness",
            f"{config.overlap.staleness}, with components of one's own: they work between a rollout and the update on"
            " it; set it to 0",
        )


def conflicts(config: Config) -> list[tuple[str, str]]:
    """Return (key, message) of values that contradict each other."""
    problems: list[tuple[str, str]] = []
    algorithm, rollout, reward, data = config.algorithm, config.rollout, config.reward, config.data
    if config.train.dtype == "fp16" and not backend_entry(config.train.backend).scales_loss:
        scaling = " or ".join(name for name, entry in BACKENDS.items() if entry.scales_loss)
        problems.append(("train.dtype", f"fp16 needs loss scaling: set train.backend to {scaling}, or dtype to bf16"))
    if config.train.dtype == "fp16" and not config.train.fp32_master:
        problems.append(
            ("train.fp32_master", "false: small updates of fp16 weights would be rounded away; set it to true")
        )
    if config.train.checkpointed_layers is not None and not config.train.gradient_checkpointing:
        problems.append(
            (
                "train.checkpointed_layers",
                f"{config.train.checkpointed_layers}: no layer recomputes; set train.gradient_checkpointing to true",
            )
        )
    problems += _name_conflicts(config)
    problems += _component_conflicts(config)
    problems += _maths_conflicts(config)
    problems += _overlap_conflicts(config)
    problems += _agent_conflicts(config)
    problems += _simulator_conflicts(config)
    problems += image_conflicts(config)
    problems += _precision_conflicts(config)
    if algorithm.filtering.low >= algorithm.filtering.high:
        problems.append(
            ("algorithm.filtering.low", f"{algorithm.filtering.low} is not below high, {algorithm.filtering.high}")
        )
    if reward.clip is not None and reward.clip[0] >= reward.clip[1]:
        problems.append(("reward.clip", f"{list(reward.clip)}: the first must be below the second"))
    problems += _grader_conflicts(config)
    if data.prompt_max_length is not None and data.prompt_max_length >= data.max_length:
        problems.append(
            (
                "data.prompt_max_length",
                f"{data.prompt_max_length} leaves no token to sample within data.max_length {data.max_length}",
            )
        )
    parallel = config.train.sequence_parallel_size
    for key, budget in (
        ("train.max_tokens_per_device", config.train.max_tokens_per_device),
        ("rollout.max_tokens_per_device", rollout.max_tokens_per_device if config.task == "rl" else None),
    ):
        what, least = ("pair", 2 * data.max_length) if config.task in ("rm", "dpo") else ("sequence", data.max_length)
        if budget is not None and budget * parallel < least:
            over = f" over train.sequence_parallel_size {parallel} devices" if parallel > 1 else ""
            problems.append((key, f"{budget}{over} holds no {what} of data.max_length, {least} tokens"))
    if parallel > 1 and not config.train.packing:
        problems.append(
            (
                "train.sequence_parallel_size",
                f"{parallel} devices can share only packed sequences, and train.packing is false",
            )
        )
    if parallel > 1 and config.train.tensor_parallel_size > 1:
        problems.append(
            (
                "train.deepspeed.tensor_parallel_size",
                f"{config.train.tensor_parallel_size} ranks share layers, and train.sequence_parallel_size {parallel}"
                " share sequences: set one of the two to 1",
            )
        )
    if config.train.attention is not None and config.train.packing:
        problems.append(
            (
                "train.attention",
                f"{config.train.attention} does not keep packed sequences apart: set train.packing to false, or leave"
                " train.attention unset",
            )
        )
    if data.probs is not None and data.path is not None:
        num_paths, num_probs = len(data.path.split(",")), len(data.probs.split(","))
        if num_paths != num_probs:
            problems.append(("data.probs", f"{num_probs} probabilities for {num_paths} data sets in data.path"))
    if data.input_template is not None and data.input_template.count("{}") != 1:
        problems.append(("data.input_template", f"{data.input_template!r} needs exactly one {{}} for the prompt"))
    sources = [name for name in ("function", "url", "model") if getattr(reward, name) is not None]
    if len(sources) > 1:
        problems.append((f"reward.{sources[1]}", f"reward.{sources[0]} is set too: rewards have one source"))
    problems += [("reward.url", problem) for problem in url_problems(reward.url)]
    heads = config.critic.value_head_prefix, reward.value_head_prefix
    if has_critic(config) and config.critic.model is None and reward.model is not None and heads[0] != heads[1]:
        problems.append(
            (
                "critic.value_head_prefix",
                f"{heads[0]!r}, but the critic begins as reward.model, whose head is called {heads[1]!r}"
                " (reward.value_head_prefix) and would be lost: set both alike, or critic.model",
            )
        )
    if rollout.max_new_tokens is not None and rollout.max_new_tokens >= data.max_length:
        problems.append(
            (
                "rollout.max_new_tokens",
                f"{rollout.max_new_tokens} leaves no room for a prompt within data.max_length {data.max_length}",
            )
        )
    return problems


def _step_conflicts(config: Config) -> list[tuple[str, str]]:
    """Refuse steps of time and of ratios that the data does not have, or that have no meaning together."""
    algorithm, problems = config.algorithm, []
    steps = {"algorithm.time_step": algorithm.time_step, "algorithm.ratio_step": algorithm.ratio_step}
    if not has_simulator(config):
        problems += [
            (key, "action: only simulators have actions; set it to token or chunk")
            for key, step in steps.items()
            if step == "action"
        ]
    ratio = ratio_step(config)
    loss = algorithm.policy_loss
    if loss == "gspo":
        problems += [
            (
                key,
                f"{step}: algorithm.policy_loss gspo has one ratio per sequence; set policy_loss to ppo, or remove it",
            )
            for key, step in steps.items()
            if step is not None and (step != "token" or key == "algorithm.ratio_step")
        ]
    elif loss != "ppo" and ratio != "token":
        key = "algorithm.time_step" if algorithm.ratio_step is None else "algorithm.ratio_step"
        problems.append(
            (
                key,
                f"{ratio}: algorithm.policy_loss {loss} has ratios of its own; set policy_loss to ppo, or ratio_step"
                " to token",
            )
        )
    if STEPS.index(ratio) > STEPS.index(algorithm.time_step):
        problems.append(
            (
                "algorithm.ratio_step",
                f"{ratio} is longer than algorithm.time_step {algorithm.time_step}: a ratio is multiplied by one"
                f" advantage, and each {algorithm.time_step} has its own; set time_step to {ratio}, or remove it",
            )
        )
    return problems


def _simulator_conflicts(config: Config) -> list[tuple[str, str]]:
    """Refuse what does not go together with simulators, or is not built for them."""
    env, problems = config.env, _step_conflicts(config)
    if not has_simulator(config):
        return problems
    stages = config.rollout.pipeline_stage_num
    if env.num_envs % stages:
        problems.append(
            ("rollout.pipeline_stage_num", f"{stages} stages do not divide env.num_envs {env.num_envs} evenly")
        )
    for key, is_set in (
        ("agent.path", config.agent.path is not None),
        ("agent.command", config.agent.command is not None),
        ("agent.environment.family", config.agent.environment.family is not None),
        ("agent.max_steps", config.agent.max_steps is not None),
    ):
        if is_set:
            problems.append((key, "env.path is set too: an episode is played by an agent or in a simulator"))
    reward = config.reward
    for key, is_set in (
        *((f"reward.{name}", getattr(reward, name)) for name in ("function", "url", "model", "graders")),
        ("reward.judge.rubric", has_judge(config)),
    ):
        if is_set:
            problems.append((key, "env.path is set, and the simulator gives the rewards: remove it"))
    if config.overlap.staleness > 0 and config.overlap.in_flight == "recompute":
        problems.append(
            (
                "overlap.in_flight",
                "recompute: simulators do not stand still while training has their devices; set it to wait, keep or"
                " restart, and place env and rollout on devices of their own",
            )
        )
    if config.overlap.staleness > 0 and env.enable_offload:
        problems.append(
            ("env.enable_offload", "true: with overlap.staleness above 0 simulators stay on their devices; unset it")
        )
    return problems


def _has_own_process(config: Config) -> bool:
    """Tell whether an environment or a function of the user's runs in processes of its own."""
    return config.agent.environment.family is not None or config.agent.python is not None


def _task_conflicts(config: Config) -> list[tuple[str, str]]:
    """Return (key, message) of data that should come from an environment, and cannot."""
    problems = []
    for key, path in (("data.path", config.data.path), ("eval.path", config.eval.path)):
        try:
            numbers = task_numbers(path)
        except ValueError as error:
            problems.append((key, str(error)))
            continue
        if numbers is not None and config.agent.environment.family is None:
            problems.append((key, f"{path}: there is no environment; set agent.environment.family"))
    return problems


def _agent_conflicts(config: Config) -> list[tuple[str, str]]:
    agent, problems = config.agent, []
    host, _, port = agent.gateway.bind.rpartition(":")
    if host and ":" not in host and not (port.isdecimal() and int(port) < 65536):
        problems.append(("agent.gateway.bind", f"{agent.gateway.bind!r}: write it as 127.0.0.1 or as 127.0.0.1:8000"))
    url = agent.gateway.advertise_url
    if url is not None and not url.startswith(("http://", "https://")):
        problems.append(("agent.gateway.advertise_url", f"{url!r}: write it as http://gateway.example:8000"))
    elif url is not None and not (host and port.isdecimal()):
        problems.append(
            (
                "agent.gateway.bind",
                f"{agent.gateway.bind!r} takes any free port, which agent.gateway.advertise_url cannot name: write it"
                " as 0.0.0.0:8000",
            )
        )
    if url is not None and config.rollout.num_hosts != 1:
        problems.append(
            (
                "rollout.num_hosts",
                "agent.gateway.advertise_url is one address, and each rollout host knows only the episodes of its own:"
                " set rollout.num_hosts to 1",
            )
        )
    problems += _task_conflicts(config)
    is_environment = agent.environment.family is not None
    if agent.path is not None and is_environment:
        problems.append(("agent.environment", f"agent.path is {agent.path}: an episode is played by one of the two"))
    if agent.command is None and not is_environment:
        return problems
    if agent.command is not None and (not agent.command or not agent.command[0]):
        problems.append(("agent.command", "empty: give a program and its arguments, as [python, agent.py]"))
    if agent.command is not None and is_environment:
        problems.append(("agent.command", "agent.environment is set: an episode is played by one of the two"))
    if agent.command is not None and agent.path is not None:
        problems.append(("agent.command", f"agent.path is {agent.path}: an episode is played by one of the two"))
    if config.data.apply_chat_template:
        problems.append(
            (
                "data.apply_chat_template",
                "true: a program gets the prompt as it is in the data, and the gateway renders the messages it sends;"
                " set it to false",
            )
        )
    return problems


def _precision_conflicts(config: Config) -> list[tuple[str, str]]:
    """Return (key, message) of engines in 8 bits that other settings rule out."""
    rollout = config.rollout
    problems = []
    for key in ("quantization", "kv_cache_dtype"):
        if getattr(rollout, key) is not None and config.train.dtype == "fp32":
            why = "fp8 is for 16-bit models, and train.dtype is fp32: set that to bf16, or leave this unset"
            problems.append((f"rollout.{key}", why))
    if rollout.quantization is not None and rollout.lora_sync == "adapter":
        why = "fp8 has not been tried with adapters that vLLM applies itself: set rollout.lora_sync to merged"
        problems.append(("rollout.quantization", why))
    if rollout.quantization is not None and config.train.full_determinism:
        why = (
            "fp8 has not been tried with train.full_determinism, for which vLLM, depending on its kernels, turns"
            " weights back into 16 bits and rounds no inputs: set that to false, or leave this unset"
        )
        problems.append(("rollout.quantization", why))
    return problems


def _overlap_conflicts(config: Config) -> list[tuple[str, str]]:
    """Return (key, message) of settings of overlap that exclude each other."""
    overlap, problems = config.overlap, []
    if config.task != "rl" or overlap.staleness == 0:
        return []
    if config.data.sampler is not None:
        problems.append(
            (
                "data.sampler",
                f"overlap.staleness is {overlap.staleness}: the scores that a sampler gets would depend on which"
                " answers arrive first; set overlap.staleness to 0, or leave data.sampler unset",
            )
        )
    if config.train.full_determinism:
        problems.append(
            (
                "train.full_determinism",
                f"overlap.staleness is {overlap.staleness}: which weights sample which answer depends on time: set"
                " it to 0, or train.full_determinism to false",
            )
        )
    if overlap_queue(config) > overlap.staleness:
        problems.append(
            (
                "overlap.queue",
                f"{overlap.queue} batches ahead would be older than overlap.staleness {overlap.staleness} allows: set"
                f" at most {overlap.staleness}, or staleness {overlap.queue}",
            )
        )
    return problems


def _maths_conflicts(config: Config) -> list[tuple[str, str]]:
    """Return (key, message) of settings of the RL algorithm that would fail, or do nothing, after the first rollout."""
    if config.task != "rl":
        return []
    problems = _teacher_conflicts(config)
    algorithm, buffer = config.algorithm, config.reward.overlong.buffer_length
    correction, kl = algorithm.correction, algorithm.kl
    if correction.low >= correction.high:
        problems.append(
            (
                "algorithm.correction.low",
                f"{correction.low} is not below high, {correction.high}: a ratio of probabilities is kept between them,"
                " usually 0.5 and 5",
            )
        )
    if correction.reject is not None:
        problems += _rejection_conflicts(correction)
    if algorithm.policy_loss == "gspo" and correction.kind in ("tis", "icepop", "seq-mask-tis"):
        problems.append(
            (
                "algorithm.correction.kind",
                f"{correction.kind} weighs tokens, and algorithm.policy_loss gspo has one ratio per sequence: set"
                " rollout-ratio, which takes that ratio to the engine's probabilities, or seq-tis, or policy_loss ppo",
            )
        )
    if algorithm.policy_loss != "gspo" and correction.kind == "rollout-ratio":
        problems.append(
            (
                "algorithm.correction.kind",
                f"rollout-ratio is the correction of algorithm.policy_loss gspo, and it is {algorithm.policy_loss}: set"
                " tis, icepop or seq-mask-tis",
            )
        )
    if algorithm.turn_credit == "own" and algorithm.estimator not in ESTIMATORS_WITH_GROUP:
        problems.append(
            (
                "algorithm.turn_credit",
                f"own needs an estimator that compares groups and does not discount, and algorithm.estimator is"
                f" {algorithm.estimator}: set {', '.join(ESTIMATORS_WITH_GROUP)}, or turn_credit to to_go",
            )
        )
    if uses_k1_loss(config) and not kl.allow_k1_loss:
        problems.append(
            (
                "algorithm.kl.estimator",
                "k1 as a loss regularises nothing: its gradient is zero on average, whatever the reference; set k2 or"
                " k3, or algorithm.kl.as_loss to false, or algorithm.kl.allow_k1_loss to true if that is wanted",
            )
        )
    if kl.coef > 0 and kl.target is not None and kl.horizon <= shortest_kl_horizon(config):
        samples = config.rollout.batch_size * config.rollout.samples_per_prompt
        problems.append(
            (
                "algorithm.kl.horizon",
                f"{kl.horizon} is too short for steps of {samples} samples: one of them could turn the coefficient"
                f" negative; set it above {shortest_kl_horizon(config):g}",
            )
        )
    limit = max_sampled_tokens(config)
    if buffer > max(limit, 0):
        problems.append(
            (
                "reward.overlong.buffer_length",
                f"{buffer} is above the {limit} tokens that an episode may sample: set it to {limit} or less, or raise"
                " rollout.max_new_tokens",
            )
        )
    return problems


def _rejection_conflicts(correction: CorrectionConfig) -> list[tuple[str, str]]:
    """Return (key, message) of bounds by which every answer, or none, would be dropped."""
    low, high = correction.reject_low, correction.reject_high
    if high is None:
        usual = (
            "2 keeps geometric means between 0.5 and 2" if correction.reject == "k1" else "0.1 is loose, 0.01 strict"
        )
        return [("algorithm.correction.reject_high", f"has to be set with reject {correction.reject}: {usual}")]
    low = 1 / high if low is None else low
    if correction.reject == "k1" and not low <= 1 <= high:
        return [
            (
                "algorithm.correction.reject_high",
                f"answers on which engine and trainer agree have the ratio 1, which is outside [{low:g}, {high:g}]: set"
                " reject_low below 1 and reject_high above 1",
            )
        ]
    if correction.reject == "k1" and low == high:
        return [
            (
                "algorithm.correction.reject_high",
                "1 keeps only answers on which engine and trainer agree to the last bit: set reject_high above 1, such"
                " as 2, which keeps geometric means between 0.5 and 2",
            )
        ]
    return []


def _grader_conflicts(config: Config) -> list[tuple[str, str]]:
    """Return (key, message) of graders that lack an option of their kind, have one of another, or share a name."""
    problems = _conflicts_of_graders("reward.graders", config.reward.graders, config.reward.function)
    problems += _conflicts_of_graders("eval.graders", config.eval.graders, config.eval.reward)
    names = {grader.name or grader.kind for grader in config.reward.graders}
    sandbox = config.reward.sandbox
    if sandbox.command is not None and not any("{folder}" in part for part in sandbox.command):
        problems.append(("reward.sandbox.command", "no part of it contains {folder}, the folder with the code to run"))
    if sandbox.command is not None and sandbox.python is not None:
        problems.append(("reward.sandbox.python", "has no effect: reward.sandbox.command starts Python itself"))
    if has_judge(config):
        problems += _judge_conflicts(config, names)
    if config.reward.graders and config.reward.model is not None:
        problems.append(("reward.graders", "cannot be added to reward.model, which scores alone: set one of them"))
    return problems


def _conflicts_of_graders(key: str, graders: Iterable[GraderConfig], function: str | None) -> list[tuple[str, str]]:
    """Return (key, message) of what is wrong with a list of graders, beside which a function may score."""
    problems: list[tuple[str, str]] = []
    own = {"pattern": "regex", "json_schema": "json", "partial": "code"}
    names: set[str] = set()
    for number, grader in enumerate(graders):
        at = f"{key}[{number}]"
        for option, kind in own.items():
            if option in grader.model_fields_set and grader.kind != kind:
                problems.append((f"{at}.{option}", f"has no effect on kind {grader.kind}; it is for kind {kind}"))
            elif getattr(grader, option) is None and grader.kind == kind:
                problems.append((f"{at}.{option}", f"not set: kind {kind} needs it"))
        if grader.kind == "code" and "timeout_s" in grader.model_fields_set:
            problems.append((f"{at}.timeout_s", "has no effect on kind code; set reward.sandbox.timeout_s"))
        name = grader.name or grader.kind
        if name in names or (name == "function" and function is not None):
            problems.append((f"{at}.name", f"{name!r} is taken: give each grader a name of its own"))
        names.add(name)
    return problems


def _teacher_conflicts(config: Config) -> list[tuple[str, str]]:
    """Return (key, message) of teachers and weights that do not go together."""
    reference, problems = config.reference, []
    if reference.teachers and config.algorithm.distill_coef == 0:
        problems.append(
            (
                "reference.teachers",
                "algorithm.distill_coef is 0, so nothing is learned from teachers: raise it, or set"
                " reference.model for a KL",
            )
        )
    if reference.teachers and reference.model is not None:
        problems.append(("reference.model", "reference.teachers is set too: list all teachers there"))
    weights = reference.teacher_weights
    if weights and set(weights) != set(reference.teachers):
        problems.append(
            (
                "reference.teacher_weights",
                f"for {', '.join(sorted(weights))}, but reference.teachers are"
                f" {', '.join(sorted(reference.teachers)) or 'not set'}: give each teacher a weight",
            )
        )
    elif weights and abs(sum(weights.values()) - 1) > 1e-6:
        problems.append(("reference.teacher_weights", f"add up to {sum(weights.values()):g} instead of 1"))
    return problems


def _judge_conflicts(config: Config, names: Collection[str]) -> list[tuple[str, str]]:
    """Return (key, message) of a judge's settings that exclude each other. names: those of the graders."""
    judge, problems = config.reward.judge, []
    urls = url_problems(judge.url, what="an endpoint", example="http://127.0.0.1:8000/v1", token="HOTSEAT_JUDGE_TOKEN")
    problems += [("reward.judge.url", problem) for problem in urls]
    low, high = judge.scale
    if low >= high:
        problems.append(("reward.judge.scale", f"[{low:g}, {high:g}]: the first has to be below the second"))
    for word, verdict in (judge.choices or {}).items():
        if word in ("True", "False"):
            read = "yes, on or true" if word == "True" else "no, off or false"
            problems.append(
                ("reward.judge.choices", f"YAML reads {read} as {word}: put the word in quotes, such as 'yes'")
            )
        if not low <= verdict <= high:
            problems.append(
                ("reward.judge.choices", f"{word} is {verdict:g}, outside of reward.judge.scale [{low:g}, {high:g}]")
            )
    if judge.choices is not None and not judge.choices:
        problems.append(("reward.judge.choices", "no word in it: give some, or leave it unset for numbers"))
    if judge.votes > 1 and judge.temperature == 0:
        problems.append(
            ("reward.judge.temperature", f"0: all {judge.votes} votes would be the same; raise it, or ask for one vote")
        )
    own = {"model", "messages", "temperature", "max_tokens", "seed", "n", "stream"} & set(judge.request)
    if own:
        problems.append(("reward.judge.request", f"{', '.join(sorted(own))}: set by the judge's other options"))
    if "?" in "".join(as_list(judge.url)):
        problems.append(("reward.judge.url", "has a query: give the address up to /v1"))
    if judge.choices and "pattern" not in judge.model_fields_set:
        problems.append(
            (
                "reward.judge.pattern",
                "not set, so it finds numbers, and reward.judge.choices are words: set a pattern such as"
                " '(?i)\\b(yes|no)\\b'",
            )
        )
    has_function = config.reward.function is not None or bool(config.reward.url)
    if judge.name in names or (judge.name == "function" and has_function):
        problems.append(("reward.judge.name", f"{judge.name!r} is taken: give the judge a name of its own"))
    if config.reward.model is not None:
        problems.append(("reward.judge", "cannot be added to reward.model, which scores alone: set one of them"))
    return problems


def missing(config: Config) -> list[tuple[str, str]]:
    """Return (key, message) of required options that are not set."""
    problems: list[tuple[str, str]] = []
    if config.actor.model is None:
        problems.append(("actor.model", "not set: give a checkpoint directory or a hub name"))
    if config.task == "rl" and _is_placed(config, "env") and not has_simulator(config):
        problems.append(
            ("env.path", "not set, but env is placed: name a simulator, babyai, gym, mujoco_warp or a Python file")
        )
    if config.data.path is None and not has_simulator(config):
        problems.append(("data.path", "not set: give a file, a saved data set or a hub name"))
    if config.task == "rl":
        reward = config.reward
        sources = (reward.function, reward.url, reward.model)
        has_other_source = reward.graders or has_judge(config) or has_agent(config)  # a simulator is one
        if not has_other_source and all(source is None for source in sources):
            problems.append(
                (
                    "reward.function",
                    "no source of rewards: set reward.function, reward.url, reward.model or agent.path; a config may"
                    " also have reward.graders, reward.judge.rubric or agent.command",
                )
            )
        if has_judge(config) and reward.judge.model is None:
            what = "a checkpoint directory or a hub name" if reward.judge.url is None else "its name at the endpoint"
            problems.append(("reward.judge.model", f"not set: give {what}"))
        if config.algorithm.distill_coef > 0 and config.reference.model is None and not config.reference.teachers:
            problems.append(
                ("reference.model", "not set: it is the teacher from which algorithm.distill_coef has the policy learn")
            )
        if config.algorithm.estimator in ESTIMATORS_WITH_GROUP and config.rollout.samples_per_prompt < 2:
            problems.append(
                (
                    "rollout.samples_per_prompt",
                    f"{config.rollout.samples_per_prompt}: a group of one has no advantage under"
                    f" {config.algorithm.estimator}; set it to 2 or more, usually 8",
                )
            )
    return problems
