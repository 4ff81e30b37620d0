"""Config of a command that samples without training. Needs neither torch nor Ray: mistakes are refused at once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hotseat.checks.named_files import num_positions
from hotseat.checks.pipeline import check_config
from hotseat.config import Config, load
from hotseat.config.load import loads
from hotseat.config.presence import has_agent, has_judge, has_judge_engine, reward_files
from hotseat.config.yaml_lines import dump
from hotseat.errors import ConfigError, Problem, UserError
from hotseat.registry.estimators import ESTIMATORS

# Keys and sections that have an effect without training.
_ENGINE = ("engine", "num_slots", "tensor_parallel_size", "memory_share", "prefix_caching", "enforce_eager")
_ANY = (
    *("seed", "trust_remote_code", "train.dtype", "cluster.threads_per_process", "data.max_length"),
    *("rollout.engine_args", "rollout.fp32_head", "rollout.max_new_tokens", "data.chat_template"),
    *(f"rollout.{name}" for name in _ENGINE),
)
_SAMPLING = ("rollout.temperature", "rollout.top_p", "rollout.top_k")
_COLUMNS = ("input_key", "label_key", "input_template", "apply_chat_template", "prompt_max_length", "probs")
_PROMPTS = (*(f"data.{name}" for name in _COLUMNS), "data.max_lost_fraction", "agent", "reward")
_OWN = {
    "generate": (*_ANY, *_SAMPLING, *_PROMPTS, "data.split", "data.max_samples", "rollout.samples_per_prompt"),
    "eval": (*_ANY, *_PROMPTS, "eval"),
    "chat": (*_ANY, *_SAMPLING),
    "play": (*_ANY, *_SAMPLING, *_PROMPTS, "data.split", "data.max_samples"),
}
# Nothing is trained: a prompt needs no group of answers, and answers no critic.
_ESTIMATOR = next(name for name, entry in ESTIMATORS.items() if not entry.needs_group and not entry.needs_critic)
_NO_EFFECT = ("agent.max_concurrent",)


def offline_config(
    command: str,
    model: str,
    data: str | None = None,
    *,
    file: str | None = None,
    flags: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
) -> Config:
    """Make the config of a command from its arguments. file: a run's config, of which only what matters here is used.

    flags: values by key that replace the file's; those that are None are left out. Overrides replace both.
    """
    _check_overrides(command, overrides)
    values = {} if file is None else _picked(command, load(file).model_dump(mode="json", exclude_defaults=True))
    settings = {
        "actor.model": model,
        "data.path": data,
        "cluster.runtime": "local",
        **(flags or {}),
    }
    settings["algorithm.estimator"] = _ESTIMATOR
    if command == "eval":
        settings["eval.path"] = data
    written = [f"{key}={json.dumps(value)}" for key, value in settings.items() if value is not None]
    config = loads(dump(values), [*written, *overrides], forget_idle=True)
    if config.eval.reward is not None or config.eval.graders:
        graders = config.model_dump(mode="json", exclude_unset=True)["eval"].get("graders", [])
        written += [f"reward.function={json.dumps(config.eval.reward)}", f"reward.graders={json.dumps(graders)}"]
        written += ["reward.functions=[]", "reward.url=null", "eval.reward=null", "eval.graders=[]"]
        values.get("reward", {}).pop("judge", None)
    if "max_length" not in config.data.model_fields_set:
        positions = _positions(model)
        if positions is not None and positions < config.data.max_length:
            written.append(f"data.max_length={positions}")
    return loads(dump(values), [*written, *overrides], forget_idle=True)


def play_config(file: str, model: str | None, overrides: Sequence[str] = ()) -> Config:
    """Make the config of `hotseat play` from that of a run. model: another one than the run's."""
    run = load(file)
    if not run.has_rollouts:
        raise UserError(f"{file}: task {run.task} has no episodes to play; this is for rl")
    if run.data.path is None or (model or run.actor.model) is None:
        raise UserError(f"{file}: actor.model and data.path must be set")
    return offline_config("play", str(model or run.actor.model), run.data.path, file=file, overrides=overrides)


def refuse(config: Config, *, needs_reward: bool, needs_data: bool = True) -> None:
    """Raise one error with everything that the config and files show to be wrong."""
    if config.reward.model is not None:
        raise UserError(
            "reward.model: only training runs score with reward models; here reward.function or reward.graders do"
        )
    if has_judge_engine(config):
        raise UserError(
            "reward.judge: only training runs have engines for a judge; here it is asked at an endpoint: serve the"
            " model, for example with `vllm serve MODEL`, and set reward.judge.url to its address"
        )
    optional = [] if needs_reward else ["reward.function"]
    check_config(config, optional if needs_data else [*optional, "data.path"])


def has_reward(config: Config) -> bool:
    """Tell whether answers get rewards: from a function, servers, graders, a judge or an agent of the user's."""
    reward = config.reward
    return bool(reward_files(config) or reward.url or reward.graders or has_judge(config) or has_agent(config))


def _check_overrides(command: str, overrides: Sequence[str]) -> None:
    problems = []
    for override in overrides:
        key = override.partition("=")[0].strip()
        if "=" in override and not _is_own(command, key):
            known = ", ".join(_OWN[command])
            problems.append(
                Problem(key, f"has no effect on `hotseat {command}`; what has: {known}", file="command line")
            )
    if problems:
        raise ConfigError(problems)


def _is_own(command: str, key: str) -> bool:
    return key not in _NO_EFFECT and any(key == own or key.startswith(f"{own}.") for own in _OWN[command])


def _picked(command: str, values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    picked: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if _is_own(command, key):
            picked[name] = value
        elif isinstance(value, dict) and (inner := _picked(command, value, f"{key}.")):
            picked[name] = inner
    return picked


def _positions(model: str) -> int | None:
    try:
        shape = json.loads((Path(model) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return num_positions(shape) if isinstance(shape, dict) else None
