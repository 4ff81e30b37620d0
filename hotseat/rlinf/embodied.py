"""RLinf's embodied task by its own script: the groups that it launches, and the runner that trains them.

`launch` records where a group's processes are; nothing starts. `EmbodiedRunner` translates the config, places roles
where the groups are, and calls what `hotseat run` calls: workers, phases and the loop are those of every run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

from hotseat.cluster import Process
from hotseat.config import Config
from hotseat.config.load import loads_in_effect
from hotseat.errors import ConfigError, PlacementError, Problem, UnsupportedError
from hotseat.rlinf.config_keys import (
    ConfigTranslation,
    at,
    simulator_of,
    their_key,
    translate,
    unsupported_values,
)
from hotseat.rlinf.configs import plain
from hotseat.rlinf.rlinf_cluster import Cluster
from hotseat.rlinf.rlinf_placement import PlacementStrategy

_POLICY = "policy"  # folder of a new policy, in that of the run
_LAYERS = 3  # of RLinf's mlp_policy, each of hidden_dim


@dataclass(frozen=True)
class LaunchedRole:
    """A role of the run to come, and its processes."""

    role: str
    processes: tuple[Process, ...]

    def selection(self) -> str:
        """Return the devices in the grammar of `cluster.component_placement`: `DEVICES:RANK` of each process."""
        if not all(process.devices for process in self.processes):
            raise PlacementError(f"{self.role}: its processes have no devices: place it on ranks of devices")
        return ",".join(f"{_range(process.devices)}:{process.rank}" for process in self.processes)

    def stop(self) -> LaunchedRole:
        return self

    def wait(self) -> None:
        """Return at once: the run has ended its processes."""


def _range(devices: Sequence[int]) -> str:
    first, last = min(devices), max(devices)
    if sorted(devices) != list(range(first, last + 1)):
        raise PlacementError(f"a process on devices {list(devices)}: the devices of a process must follow one another")
    return str(first) if first == last else f"{first}-{last}"


@dataclass(frozen=True)
class UnlaunchedRole:
    """A role that was not launched yet."""

    role: str

    def launch(
        self, cluster: Cluster, name: str | None = None, placement_strategy: PlacementStrategy | None = None
    ) -> LaunchedRole:
        """Return the role on the devices of a strategy. Its name there is ours; `name` is RLinf's, and not used."""
        if placement_strategy is None:
            raise PlacementError(f"{self.role}: launch needs a placement_strategy")
        return LaunchedRole(self.role, tuple(placement_strategy.get_placement(cluster)))


class EmbodiedGroup:
    """A class of RLinf's workers, which stands for a role here."""

    role: ClassVar[str]

    @classmethod
    def create_group(cls, cfg: Any) -> UnlaunchedRole:
        return UnlaunchedRole(cls.role)


class EmbodiedFSDPActor(EmbodiedGroup):
    role = "actor"


class MultiStepRolloutWorker(EmbodiedGroup):
    role = "rollout"


class EnvWorker(EmbodiedGroup):
    role = "env"


class EmbodiedRewardWorker(EmbodiedGroup):
    """RLinf's reward model of images, which is not supported."""

    @classmethod
    def create_group(cls, cfg: Any) -> UnlaunchedRole:
        raise UnsupportedError(
            "reward.use_reward_model: rewards of simulators are the simulator's, or success; set it to False"
        )


class EmbodiedAPIRewardWorker(EmbodiedRewardWorker):
    """RLinf's reward by an API, which is not supported."""


def validate_cfg(cfg: Any) -> Any:
    """Check a config of RLinf's embodied task, list its keys without effect on standard error, and return it."""
    values = plain(cfg)
    translation = _translated(values)
    _, idle = loads_in_effect(yaml.safe_dump(translation.values, sort_keys=False), [])
    for key, because in [*translation.no_effect, *((their_key(values, key), because) for key, because in idle)]:
        print(f"no effect here: {key} because {because}", file=sys.stderr)
    if at(values, "runner.per_worker_log_path") is None:
        # The script reads it; logs of workers are where those of every run are.
        with sys.modules["omegaconf"].open_dict(cfg):
            cfg.runner.per_worker_log_path = None
    return cfg


def _translated(values: Mapping[str, Any]) -> ConfigTranslation:
    """Return the config in our keys. Raises for a simulator, a model or a value that has no counterpart here."""
    problems = unsupported_values(values)
    kind = at(values, "env.train.env_type")
    if kind is None or simulator_of(kind) is None:
        problems.append(
            Problem(
                "env.train.env_type",
                f"{kind} is no simulator here: gym, babyai, mujoco_warp, or a Python file (docs/simulators.md)",
            )
        )
    if not is_mlp(values) and not any(at(values, key) for key in ("actor.model.model_path", "rollout.model_dir")):
        kind = at(values, "actor.model.model_type")
        problems.append(
            Problem("actor.model.model_path", f"is not set, and only an mlp_policy is made anew, not {kind}")
        )
    if problems:
        raise ConfigError(problems)
    return translate(values)


def is_mlp(values: Mapping[str, Any]) -> bool:
    return at(values, "actor.model.model_type") == "mlp_policy"


class EmbodiedRunner:
    """Trains the roles that a script has launched, by the loop of every run."""

    def __init__(self, cfg: Any, actor: LaunchedRole, rollout: LaunchedRole, env: LaunchedRole, reward: None = None):
        self._values = plain(cfg)
        self._roles = (actor, rollout, env)
        self._config: Config | None = None

    def init_workers(self) -> None:
        """Check the run, and make its policy. Workers start with the run."""
        values = dict(_translated(self._values).values)
        placement = {role.role: role.selection() for role in self._roles}
        values["cluster"] = {**values.get("cluster", {}), "component_placement": placement}
        if is_mlp(self._values) and "model" not in values.get("actor", {}):
            folder = Path(values.get("run_dir", "runs")) / f"{values.get('name', 'embodied')}-{_POLICY}"
            _write_mlp(folder, self._values)
            values["actor"] = {**values.get("actor", {}), "model": str(folder.resolve())}
        self._config, _ = loads_in_effect(yaml.safe_dump(values, sort_keys=False), [])

    def run(self) -> None:
        """Train to the end."""
        from hotseat.loop.start import start

        assert self._config is not None, "run before init_workers"
        cluster = Cluster.current()
        if cluster is not None and not cluster.groups:
            cluster.close()  # the run has one of its own, and on the same devices
        start(self._config)


def _write_mlp(folder: Path, values: Mapping[str, Any]) -> None:
    from hotseat.numeric.models import NumericConfig, write_policy

    model = at(values, "actor.model")
    sizes = NumericConfig(
        state_dim=model["obs_dim"],
        action_dim=model["action_dim"],
        num_actions=model.get("num_action_chunks", 1),
        hidden_sizes=[model.get("hidden_dim", 256)] * _LAYERS,
    )
    write_policy(folder, sizes, seed=at(values, "actor.seed") or 0)
