"""Checks of a config beyond the types and ranges of its values.

`no_effect` finds options that were set but can change nothing, by what the schema says of each. `conflicts` finds
values that contradict each other: a function for each section or subject, listed at the end. `missing` finds required
options that are unset; a config may be planned, explained and printed before it is complete.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from hotseat.config.presence import (
    has_agent,
    has_critic,
    has_evaluation,
    has_images,
    has_inference,
    has_judge,
    has_reward_model,
    has_rewards,
    has_simulator,
    has_teacher,
    has_teacher_alone,
    is_placed,
    placed_roles,
    task_numbers,
)
from hotseat.config.resolved import (
    STEPS,
    correction_kind,
    fp8_options,
    max_new_tokens,
    overlap_queue,
    ratio_step,
    shortest_kl_horizon,
    uses_k1_loss,
)
from hotseat.config.reward_conflicts import REWARD_CHECKS, missing_parts
from hotseat.config.rope import rope_scaling_problem
from hotseat.config.schema import Config, conditions_of, tasks_of
from hotseat.config.store_urls import is_store_url, store_url_problem
from hotseat.registry.backends import BACKENDS, backend_entry
from hotseat.registry.correction_kinds import CORRECTIONS, correction_entry
from hotseat.registry.engines import ENGINES, engine_entry
from hotseat.registry.estimators import ESTIMATORS, estimator_entry
from hotseat.registry.lookup import names_that
from hotseat.registry.policy_losses import DEFAULT_POLICY_LOSS, POLICY_LOSSES, policy_loss_entry
from hotseat.registry.roles import ROLES

Problems = Iterator[tuple[str, str]]  # key, message

_NO_IMAGES = "not built for images yet"


def no_effect(config: Config, set_keys: Iterable[str]) -> list[tuple[str, str]]:
    """Return (key, reason) of every option in `set_keys` that can change nothing, in their order."""
    return [(key, why) for key in set_keys if (why := _why_idle(config, key)) is not None]


def _why_idle(config: Config, key: str) -> str | None:
    tasks = tasks_of(key)
    if config.task not in tasks:
        return f"task is {config.task}; this is for {' or '.join(tasks)}"
    problems = (condition.problem(config, section) for section, condition in conditions_of(key))
    return next((problem for problem in problems if problem is not None), None)


def conflicts(config: Config) -> list[tuple[str, str]]:
    """Return (key, message) of values that contradict each other."""
    checks = (*_OF_ALL_TASKS, *(_OF_RL if config.has_rollouts else ()))
    return [problem for check in checks for problem in check(config)]


def missing(config: Config) -> list[tuple[str, str]]:
    """Return (key, message) of required options that are not set."""
    return [*_missing_models_and_data(config), *(_missing_in_rl(config) if config.has_rollouts else ())]


def _missing_models_and_data(config: Config) -> Problems:
    if config.actor.model is None:
        yield "actor.model", "not set: give a checkpoint directory or a hub name"
    if config.has_rollouts and is_placed(config, "env") and not has_simulator(config):
        yield "env.path", "not set, but env is placed: name a simulator, babyai, gym, mujoco_warp or a Python file"
    if config.data.path is None and not has_simulator(config):
        yield "data.path", "not set: give a file, a saved data set or a hub name"


def _missing_in_rl(config: Config) -> Problems:
    reward, samples = config.reward, config.rollout.samples_per_prompt
    if not has_rewards(config) and not has_teacher_alone(config):
        yield (
            "reward.function",
            "no source of rewards: set reward.function, reward.url, reward.model or agent.path; a config may also have"
            " reward.graders, reward.judge.rubric or agent.command",
        )
    if has_judge(config) and reward.judge.model is None:
        what = "a checkpoint directory or a hub name" if reward.judge.url is None else "its name at the endpoint"
        yield "reward.judge.model", f"not set: give {what}"
    if has_teacher(config) and config.reference.model is None and not config.reference.teachers:
        key = "algorithm.distill_coef" if config.algorithm.distill_coef > 0 else "algorithm.distill.coef"
        yield "reference.model", f"not set: it is the teacher from which {key} has the policy learn"
    if estimator_entry(config.algorithm.estimator).needs_group and samples < 2 and not has_teacher_alone(config):
        yield (
            "rollout.samples_per_prompt",
            f"{samples}: a group of one has no advantage under {config.algorithm.estimator}; set it to 2 or more,"
            " usually 8",
        )
    yield from missing_parts(config)


# --- agent and env: who plays the episodes ----------------------------------------------------------------------------


def _tasks_of_environments(config: Config) -> Problems:
    sets = ((f"eval.sets.{name}.path", each.path) for name, each in config.eval.sets.items())
    for key, path in (("data.path", config.data.path), ("eval.path", config.eval.path), *sets):
        try:
            numbers = task_numbers(path)
        except ValueError as error:
            yield key, str(error)
            continue
        if numbers is not None and config.agent.environment.family is None:
            yield key, f"{path}: there is no environment; set agent.environment.family"


def _evaluation_sets(config: Config) -> Problems:
    for name in config.eval.sets:
        if not re.fullmatch(r"\w[\w.-]*", name) or name == "components":
            text = "a name of letters, digits, `-`, `_` and `.`, and not components, whose metrics would have it, too"
            yield f"eval.sets.{name}", f"{name!r}: give {text}"


def _gateway(config: Config) -> Problems:
    bind, url = config.agent.gateway.bind, config.agent.gateway.advertise_url
    host, _, port = bind.rpartition(":")
    if host and ":" not in host and not (port.isdecimal() and int(port) < 65536):
        yield "agent.gateway.bind", f"{bind!r}: write it as 127.0.0.1 or as 127.0.0.1:8000"
    if url is None:
        return
    if not url.startswith(("http://", "https://")):
        yield "agent.gateway.advertise_url", f"{url!r}: write it as http://gateway.example:8000"
    elif not (host and port.isdecimal()):
        yield (
            "agent.gateway.bind",
            f"{bind!r} takes any free port, which agent.gateway.advertise_url cannot name: write it as 0.0.0.0:8000",
        )
    if config.rollout.num_hosts != 1:
        why = "agent.gateway.advertise_url is one address, and each rollout host knows only the episodes of its own"
        yield "rollout.num_hosts", f"{why}: set rollout.num_hosts to 1"


def _players(config: Config) -> Problems:
    path, command, family = config.agent.path, config.agent.command, config.agent.environment.family
    only_one = "an episode is played by one of the two"
    if path is not None and family is not None:
        yield "agent.environment", f"agent.path is {path}: {only_one}"
    if command is not None and family is not None:
        yield "agent.command", f"agent.environment is set: {only_one}"
    if command is not None and path is not None:
        yield "agent.command", f"agent.path is {path}: {only_one}"
    for key, player in (("agent.path", path), ("agent.command", command), ("agent.environment.family", family)):
        if player is not None and has_simulator(config):
            yield key, "env.path is set too: an episode is played by an agent or in a simulator"
    if command is not None and (not command or not command[0]):
        yield "agent.command", "empty: give a program and its arguments, as [python, agent.py]"
    if (command is not None or family is not None) and config.data.apply_chat_template:
        yield (
            "data.apply_chat_template",
            "true: a program gets the prompt as it is in the data, and the gateway renders the messages it sends; set"
            " it to false",
        )


def _simulators(config: Config) -> Problems:
    if not has_simulator(config):
        return
    stages, num_envs = config.rollout.pipeline_stage_num, config.env.num_envs
    if num_envs % stages:
        yield "rollout.pipeline_stage_num", f"{stages} stages do not divide env.num_envs {num_envs} evenly"
    if config.overlap.staleness > 0 and config.overlap.in_flight == "recompute":
        yield (
            "overlap.in_flight",
            "recompute: simulators do not stand still while training has their devices; set it to wait, keep or"
            " restart, and place env and rollout on devices of their own",
        )
    if config.overlap.staleness > 0 and config.env.enable_offload:
        yield ("env.enable_offload", "true: with overlap.staleness above 0 simulators stay on their devices; unset it")


# --- algorithm, and the teachers in reference -------------------------------------------------------------------------


def _teachers(config: Config) -> Problems:
    teachers, weights = config.reference.teachers, config.reference.teacher_weights
    if teachers and config.reference.model is not None:
        yield "reference.model", "reference.teachers is set too: list all teachers there"
    if weights and set(weights) != set(teachers):
        yield (
            "reference.teacher_weights",
            f"for {', '.join(sorted(weights))}, but reference.teachers are"
            f" {', '.join(sorted(teachers)) or 'not set'}: give each teacher a weight",
        )
    elif weights and abs(sum(weights.values()) - 1) > 1e-6:
        yield "reference.teacher_weights", f"add up to {sum(weights.values()):g} instead of 1"


def _distillation(config: Config) -> Problems:
    distill, reference = config.algorithm.distill, config.reference
    if distill.coef == 0:
        return
    if distill.teacher_input_key is not None:
        yield from _teacher_prompts(config)
    if reference.engine is not None:
        yield from _teacher_engine(config)
    if distill.sampled < 1:
        yield from _given_answers(config)
    if reference.teacher_weights:
        yield (
            "reference.teacher_weights",
            "algorithm.distill.coef is above 0, and distributions of several teachers are not mixed yet: let prompts"
            " name their teachers in the column datasource, or use algorithm.distill_coef, which mixes log-probs",
        )
    elif reference.teachers and distill.top_k is None:
        yield (
            "algorithm.distill.top_k",
            "null: of several teachers only the most likely tokens are compared yet; set it to 64 or so",
        )
    if backend_entry(config.train.backend).has_zero_options and config.train.deepspeed.deepcompile:
        yield (
            "train.deepspeed.deepcompile",
            "true: a divergence from a teacher is not part of what it compiles; set it to false, or"
            " algorithm.distill.coef to 0",
        )


def _teacher_engine(config: Config) -> Problems:
    """Find what an engine does not do for a teacher."""
    reference, train, entry = config.reference, config.train, engine_entry(str(config.reference.engine))
    if not entry.teaches:
        names = " or ".join(names_that(ENGINES, "teaches"))
        yield "reference.engine", f"{entry.name}, which says no likely tokens: set it to {names}, or leave it unset"
    problems = {
        "reference.teachers is set, and an engine has one model: set reference.model": bool(reference.teachers),
        "algorithm.distill.top_k is null, and an engine gives no hidden states: set that to 64 or so": (
            config.algorithm.distill.top_k is None
        ),
        "train.tensor_parallel_size or train.sequence_parallel_size is above 1, and each of its processes has a whole"
        " model": train.num_model_parallel > 1,
        "there are images, which a teacher on an engine is not built for yet": has_images(config),
    }
    for problem in (text for text, is_met in problems.items() if is_met):
        yield "reference.engine", f"{entry.name}: {problem}, or leave this unset"


def _teacher_prompts(config: Config) -> Problems:
    others = {
        "an agent": has_agent(config),
        "data.image_key": config.data.image_key is not None,
        "overlap.staleness": config.overlap.staleness > 0,
        "log.keep_rollouts": config.log.keep_rollouts,
    }
    for name in (name for name, is_set in others.items() if is_set):
        why = f"prompts of a teacher are not built for {name} yet: remove one of the two"
        yield "algorithm.distill.teacher_input_key", why


def _given_answers(config: Config) -> Problems:
    """Find what needs answers that the policy has sampled: given ones have a divergence, and nothing else."""
    algorithm, key = config.algorithm, "algorithm.distill.sampled"
    if algorithm.distill.answer_key is None:
        yield "algorithm.distill.answer_key", f"not set, and {key} is below 1: name the column with given answers"
    others = {
        "rewards": has_rewards(config),
        "algorithm.kl.coef": algorithm.kl.coef > 0,
        "algorithm.distill_coef": algorithm.distill_coef > 0,
        "overlap.staleness": config.overlap.staleness > 0,
        "log.keep_rollouts": config.log.keep_rollouts,
        "data.image_key": config.data.image_key is not None,
        "rollout.max_thinking_tokens": config.rollout.max_thinking_tokens is not None,
    }
    for name in (name for name, is_set in others.items() if is_set):
        what = "a source of rewards" if name == "rewards" else name
        yield key, f"{algorithm.distill.sampled:g}, and {what} is for sampled answers: set it to 1, or remove {what}"


def _ranges(config: Config) -> Problems:
    filtering, correction = config.algorithm.filtering, config.algorithm.correction
    if filtering.low >= filtering.high:
        yield "algorithm.filtering.low", f"{filtering.low} is not below high, {filtering.high}"
    if correction.low >= correction.high:
        why = "a ratio of probabilities is kept between them, usually 0.5 and 5"
        yield "algorithm.correction.low", f"{correction.low} is not below high, {correction.high}: {why}"


def _correction(config: Config) -> Problems:
    loss, entry = config.algorithm.policy_loss, correction_entry(correction_kind(config))
    has_episode_ratio = policy_loss_entry(loss).has_episode_ratio
    if has_episode_ratio and entry.weighs_tokens:
        replacing = " or ".join(names_that(CORRECTIONS, "replaces_ratio"))
        per_episode = " or ".join(names_that(CORRECTIONS, "is_per_episode"))
        yield (
            "algorithm.correction.kind",
            f"{entry.name} weighs tokens, and algorithm.policy_loss {loss} has one ratio per sequence: set {replacing},"
            f" which takes that ratio to the engine's probabilities, {per_episode}, or policy_loss"
            f" {DEFAULT_POLICY_LOSS}",
        )
    elif not has_episode_ratio and entry.replaces_ratio:
        others = " and ".join(names_that(POLICY_LOSSES, "has_episode_ratio"))
        yield (
            "algorithm.correction.kind",
            f"{entry.name} is the correction of algorithm.policy_loss {others}, and it is {loss}: set"
            f" {' or '.join(names_that(CORRECTIONS, 'weighs_tokens'))}",
        )


def _rejection(config: Config) -> Problems:
    correction, key = config.algorithm.correction, "algorithm.correction.reject_high"
    reject, low, high = correction.reject, correction.reject_low, correction.reject_high
    if reject is None:
        return
    if high is None:
        usual = "2 keeps geometric means between 0.5 and 2" if reject == "k1" else "0.1 is loose, 0.01 strict"
        yield key, f"has to be set with reject {reject}: {usual}"
        return
    low = 1 / high if low is None else low
    if reject == "k1" and not low < 1 < high:
        yield (
            key,
            "answers on which engine and trainer agree up to rounding have ratios on both sides of 1, and the"
            f" bounds keep those from {low:g} to {high:g}: set reject_low below 1 and reject_high above 1, such as"
            " 0.5 and 2",
        )


def _turn_credit(config: Config) -> Problems:
    algorithm = config.algorithm
    if algorithm.turn_credit == "own" and not estimator_entry(algorithm.estimator).credits_own_turns:
        why = "own needs an estimator that compares groups and does not discount, and algorithm.estimator is"
        others = ", ".join(names_that(ESTIMATORS, "credits_own_turns"))
        yield "algorithm.turn_credit", f"{why} {algorithm.estimator}: set {others}, or turn_credit to to_go"


def _kl(config: Config) -> Problems:
    kl, shortest = config.algorithm.kl, shortest_kl_horizon(config)
    if uses_k1_loss(config) and not kl.allow_k1_loss:
        yield (
            "algorithm.kl.estimator",
            "k1 as a loss regularises nothing: its gradient is zero on average, whatever the reference; set k2 or k3,"
            " or algorithm.kl.as_loss to false, or algorithm.kl.allow_k1_loss to true if that is wanted",
        )
    if kl.coef > 0 and kl.target is not None and kl.horizon <= shortest:
        samples = config.rollout.batch_size * config.rollout.samples_per_prompt
        yield (
            "algorithm.kl.horizon",
            f"{kl.horizon} is too short for steps of {samples} samples: one of them could turn the coefficient"
            f" negative; set it above {shortest:g}",
        )


def _steps(config: Config) -> Problems:
    algorithm, ratio, time = config.algorithm, ratio_step(config), config.algorithm.time_step
    steps = {"algorithm.time_step": time, "algorithm.ratio_step": algorithm.ratio_step}
    for key, step in steps.items():
        if step == "action" and not has_simulator(config):
            yield key, "action: only simulators have actions; set it to token or chunk"
    loss, others = policy_loss_entry(algorithm.policy_loss), " or ".join(names_that(POLICY_LOSSES, "has_steps"))
    if loss.has_episode_ratio:
        for key, step in steps.items():
            if step is not None and (step != "token" or key == "algorithm.ratio_step"):
                yield (
                    key,
                    f"{step}: algorithm.policy_loss {loss.name} has one ratio per sequence; set policy_loss to"
                    f" {others}, or remove it",
                )
    elif not loss.has_steps and ratio != "token":
        yield (
            "algorithm.time_step" if algorithm.ratio_step is None else "algorithm.ratio_step",
            f"{ratio}: algorithm.policy_loss {algorithm.policy_loss} has ratios of its own; set policy_loss to"
            f" {others}, or ratio_step to token",
        )
    if STEPS.index(ratio) > STEPS.index(time):
        yield (
            "algorithm.ratio_step",
            f"{ratio} is longer than algorithm.time_step {time}: a ratio is multiplied by one advantage, and each"
            f" {time} has its own; set time_step to {ratio}, or remove it",
        )


# --- data -------------------------------------------------------------------------------------------------------------


def _data(config: Config) -> Problems:
    data, whole, answer = config.data, config.data.max_length, config.rollout.max_new_tokens
    thinking = config.rollout.max_thinking_tokens
    if config.has_rollouts and thinking is not None and thinking >= max_new_tokens(config):
        text = f"{thinking} leaves no token for the answer: an answer may have {max_new_tokens(config)} in all"
        yield "rollout.max_thinking_tokens", f"{text} (rollout.max_new_tokens)"
    if data.prompt_max_length is not None and data.prompt_max_length >= whole:
        text = f"{data.prompt_max_length} leaves no token to sample within data.max_length {whole}"
        yield "data.prompt_max_length", text
    if answer is not None and answer >= whole:
        yield "rollout.max_new_tokens", f"{answer} leaves no room for a prompt within data.max_length {whole}"
    if data.probs is not None and data.path is not None:
        num_paths, num_probs = len(data.path.split(",")), len(data.probs.split(","))
        if num_paths != num_probs:
            yield "data.probs", f"{num_probs} probabilities for {num_paths} data sets in data.path"
    if data.input_template is not None and data.input_template.count("{}") != 1:
        yield "data.input_template", f"{data.input_template!r} needs exactly one {{}} for the prompt"
    if data.image_key is not None and data.max_images_per_prompt == 0:
        yield "data.max_images_per_prompt", "0, and data.image_key names a column of images: set it to 1 or more"


def _images_in_training(config: Config) -> Problems:
    train = config.train
    is_set = {
        "train.sequence_parallel_size": train.sequence_parallel_size > 1,
        "train.deepspeed.tensor_parallel_size": train.tensor_parallel_size > 1,
        "train.deepspeed.deepcompile": backend_entry(train.backend).has_zero_options and train.deepspeed.deepcompile,
        "train.liger_kernel": train.liger_kernel,
    }
    if has_images(config):
        yield from ((key, f"{_NO_IMAGES}: leave it unset") for key in is_set if is_set[key])


def _images_in_rollouts(config: Config) -> Problems:
    if not has_images(config):
        return
    has_column, rollout = config.data.image_key is not None, config.rollout
    if not engine_entry(rollout.engine).sees_simulators and not has_column:
        engines = " or ".join(names_that(ENGINES, "sees_simulators"))
        yield "rollout.engine", f"{rollout.engine} is not built for images of simulators yet: set it to {engines}"
    for key in fp8_options(config):
        yield key, f"fp8 is {_NO_IMAGES}: leave it unset"
    if has_reward_model(config) and config.reward.retokenize:
        why = "images are prepared for the actor's tokens: choose a reward model with the actor's tokenizer"
        yield "reward.retokenize", f"true, but {why}, and set it to false"
    if config.agent.environment.family is not None and has_column:
        why = f"environments of libraries are {_NO_IMAGES}: write an Environment, and set agent.path"
        yield "agent.environment.family", why


# --- models, and the precision in which engines compute ---------------------------------------------------------------


def _value_heads(config: Config) -> Problems:
    critic, reward = config.critic, config.reward
    heads = critic.value_head_prefix, reward.value_head_prefix
    if has_critic(config) and critic.model is None and reward.model is not None and heads[0] != heads[1]:
        yield (
            "critic.value_head_prefix",
            f"{heads[0]!r}, but the critic begins as reward.model, whose head is called {heads[1]!r}"
            " (reward.value_head_prefix) and would be lost: set both alike, or critic.model",
        )


def _fp8_engines(config: Config) -> Problems:
    for key in fp8_options(config) if config.train.dtype == "fp32" else ():
        yield key, "fp8 is for 16-bit models, and train.dtype is fp32: set that to bf16, or leave this unset"
    if config.rollout.quantization is None:
        return
    if config.rollout.lora_sync == "adapter":
        why = "fp8 has not been tried with adapters that vLLM applies itself: set rollout.lora_sync to merged"
        yield "rollout.quantization", why
    if config.train.full_determinism:
        yield (
            "rollout.quantization",
            "fp8 has not been tried with train.full_determinism, for which vLLM, depending on its kernels, turns"
            " weights back into 16 bits and rounds no inputs: set that to false, or leave this unset",
        )


# --- cluster, flow, overlap and components: what runs where and when --------------------------------------------------


def _names_of_roles(config: Config) -> Problems:
    key, placed = "cluster.component_names", placed_roles(config)
    for name, role in config.cluster.component_names.items():
        if name in ROLES:
            yield key, f"{name} is a role already: choose another name for {role}"
            continue
        if name in placed:  # the loader replaces names, unless that would name a role twice
            yield key, f"{name} is {role}, which cluster.component_placement places twice: keep one of the two entries"
        for phase in config.flow or ():
            if isinstance(phase.run, dict) and name in phase.run:
                twice = f"{name} is {role}, which it names twice: keep one of the two entries"
                yield "flow", f"phase {phase.name!r}: {twice}"


def _components(config: Config) -> Problems:
    for name, component in config.components.items():
        key = f"components.{name}"
        if name in (*ROLES, "agents"):
            yield key, f"{name} is the name of processes that every run may have: choose another"
        elif name in config.cluster.component_names:
            role = config.cluster.component_names[name]
            yield key, f"cluster.component_names has {name} for {role}: choose another name for one of them"
        elif not re.fullmatch(r"[A-Za-z_][\w-]*", name):
            yield key, f"{name!r}: begin with a letter, and use letters, digits, '_' and '-'"
        if component.evaluates and not has_evaluation(config):
            why = "true, but nothing is evaluated: remove it, or set eval.path (or env.eval_seeds)"
            yield f"{key}.evaluates", why


def _overlap(config: Config) -> Problems:
    staleness, queue = config.overlap.staleness, overlap_queue(config)
    if staleness == 0:
        return
    if config.components:
        yield (
            "overlap.staleness",
            f"{staleness}, with custom components: they work between a rollout and the update on it; set it to 0",
        )
    if config.data.sampler is not None:
        yield (
            "data.sampler",
            f"overlap.staleness is {staleness}: the scores that a sampler gets would depend on which answers arrive"
            " first; set overlap.staleness to 0, or leave data.sampler unset",
        )
    if config.train.full_determinism:
        yield (
            "train.full_determinism",
            f"overlap.staleness is {staleness}: which weights sample which answer depends on time: set it to 0, or"
            " train.full_determinism to false",
        )
    if staleness < queue:
        yield (
            "overlap.queue",
            f"{queue} batches ahead would be older than overlap.staleness {staleness} allows: set at most {staleness},"
            f" or staleness {queue}",
        )


# --- train ------------------------------------------------------------------------------------------------------------


def _fp16(config: Config) -> Problems:
    if config.train.dtype != "fp16":
        return
    if not backend_entry(config.train.backend).scales_loss:
        scaling = " or ".join(names_that(BACKENDS, "scales_loss"))
        yield "train.dtype", f"fp16 needs loss scaling: set train.backend to {scaling}, or dtype to bf16"
    if not config.train.fp32_master:
        yield "train.fp32_master", "false: small updates of fp16 weights would be rounded away; set it to true"


def _four_bits(config: Config) -> Problems:
    if not config.train.load_in_4bit:
        return
    key, deepspeed = "train.load_in_4bit", config.train.deepspeed
    if config.rollout.lora_sync == "merged":
        yield "rollout.lora_sync", f"merged, and nothing can be merged into 4 bits ({key}): unset it, or set adapter"
    if config.rollout.quantization is not None:
        yield "rollout.quantization", f"engines have the weights that are frozen in NF4 ({key}): unset one of the two"
    if has_inference(config):
        yield key, "a copy of the policy (the role inference) gets merged weights: do not place it, or unset this"
    if deepspeed.tensor_parallel_size > 1 or deepspeed.deepcompile:
        name = "deepcompile" if deepspeed.deepcompile else "tensor_parallel_size"
        yield f"train.deepspeed.{name}", f"has not been tried with weights of 4 bits ({key}): unset one of the two"


def _token_budgets(config: Config) -> Problems:
    parallel, is_pair = config.train.sequence_parallel_size, config.task_entry.rows == "pairs"
    what, least = ("pair", 2 * config.data.max_length) if is_pair else ("sequence", config.data.max_length)
    budgets = {"train": config.train.max_tokens_per_device}
    if config.has_rollouts:
        budgets["rollout"] = config.rollout.max_tokens_per_device
    for section, budget in budgets.items():
        if budget is not None and budget * parallel < least:
            over = f" over train.sequence_parallel_size {parallel} devices" if parallel > 1 else ""
            text = f"{budget}{over} holds no {what} of data.max_length, {least} tokens"
            yield f"{section}.max_tokens_per_device", text


def _model_parallelism(config: Config) -> Problems:
    train = config.train
    sequences, layers = train.sequence_parallel_size, train.tensor_parallel_size
    if sequences > 1 and not train.packing:
        text = f"{sequences} devices can share only packed sequences, and train.packing is false"
        yield "train.sequence_parallel_size", text
    if sequences > 1 and layers > 1:
        yield (
            "train.deepspeed.tensor_parallel_size",
            f"{layers} ranks share layers, and train.sequence_parallel_size {sequences} share sequences: set one of the"
            " two to 1",
        )
    if train.attention is not None and train.packing:
        yield (
            "train.attention",
            f"{train.attention} does not keep packed sequences apart: set train.packing to false, or leave"
            " train.attention unset",
        )


def _rope_scaling(config: Config) -> Problems:
    scaling = config.actor.rope_scaling
    if scaling is not None and (problem := rope_scaling_problem(scaling)):
        yield "actor.rope_scaling", problem
    elif scaling is not None and has_images(config):
        yield (
            "actor.rope_scaling",
            "positions of models with images have several axes, which are not stretched: unset it",
        )


def _urls(config: Config) -> Problems:
    """Only checkpoints may go to a storage elsewhere."""
    section = config.checkpoint
    if section.url is not None and (problem := store_url_problem(section.url)) is not None:
        yield "checkpoint.path", problem
    for key, path in (("run_dir", config.run_dir), ("checkpoint.export_path", section.export_path)):
        if path is not None and is_store_url(path):
            yield key, "has to be a folder of this machine; checkpoint.path alone may be a URL"


_OF_ALL_TASKS = (
    _urls,
    _rope_scaling,
    _tasks_of_environments,
    _data,
    _images_in_training,
    _names_of_roles,
    _fp16,
    _four_bits,
    _token_budgets,
    _model_parallelism,
)
_OF_RL = (
    *(_evaluation_sets, _gateway, _players, _simulators),
    *(_teachers, _distillation, _ranges, _correction, _rejection, _turn_credit, _kl, _steps),
    *(_images_in_rollouts, _value_heads, _fp8_engines),
    *(_components, _overlap),
    *REWARD_CHECKS,
)
