"""Any registered environment of gymnasium, by its name.

Observations: numbers and vectors become `Observation.state`, pictures `Observation.image`, text and missions the words;
a dictionary is put together from its entries. Whether an episode succeeded is what the environment's `info` says under
`success` or `is_success`; where it says nothing, nobody knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hotseat.envs.simulator import ActionSpec, Observation, Simulator, SimulatorStep, Task
from hotseat.errors import UserError

UNBOUNDED = 10.0  # values of a state without bounds are clipped here
_NO_BOUND = float(np.finfo(np.float32).max)  # which some environments write instead of infinity


class GymSimulator(Simulator):
    """One environment of gymnasium for each task, which are their names; they must have the same spaces.

    max_steps: instead of the environment's own limit. kwargs: of `gymnasium.make`; `imports` are modules to import
    before, which register environments. describe: makes the observation of an environment, if its space is not read.
    """

    is_on_device = False
    state_bounds: tuple[np.ndarray, np.ndarray] | None

    def __init__(
        self,
        tasks: Sequence[str],
        max_steps: int | None = None,
        *,
        describe: Callable[[Any, Any], Observation] | None = None,
        **kwargs: Any,
    ):
        import importlib

        import gymnasium

        for module in kwargs.pop("imports", ()):
            importlib.import_module(module)
        if not tasks:
            raise UserError("env.tasks is empty: name environments, such as CartPole-v1")
        limit = {} if max_steps is None else {"max_episode_steps": max_steps}
        try:
            self.environments = [gymnasium.make(name, **limit, **kwargs) for name in tasks]
        except gymnasium.error.Error as error:
            raise UserError(f"env.tasks: {error}") from None
        except TypeError as error:
            raise UserError(f"env.kwargs: {error}") from None
        self.tasks = [Task(index, name) for index, name in enumerate(tasks)]
        self._spaces = [environment.observation_space for environment in self.environments]
        self._describe = describe
        actions = [environment.action_space for environment in self.environments]
        if any(repr(space) != repr(actions[0]) for space in actions):
            raise UserError(f"env.tasks: the tasks have different actions: {', '.join(map(repr, actions))}")
        self.action = _action_spec(actions[0])
        self.state_bounds, self.num_state_values = None, None
        if describe is None:
            if any(space != self._spaces[0] for space in self._spaces):
                raise UserError(
                    f"env.tasks: the tasks have different observations: {', '.join(map(repr, self._spaces))}"
                )
            self.state_bounds = _state_bounds(self._spaces[0])
            self.num_state_values = _num_values(self._spaces[0])
        self._current = 0

    def reset(self, task: int, seed: int) -> Observation:
        self._current = task
        environment = self.environments[task]
        environment.action_space.seed(seed)
        observation, _ = environment.reset(seed=seed)
        return self._seen(observation)

    def step(self, action: np.ndarray) -> SimulatorStep:
        environment = self.environments[self._current]
        space = environment.action_space
        is_numbered = self.action.num_values is not None
        taken = int(action[0]) + int(space.start) if is_numbered else action.astype(space.dtype).reshape(space.shape)
        observation, reward, terminated, truncated, info = environment.step(taken)
        success = self._success(info, bool(terminated), float(reward))
        is_late = bool(truncated and not terminated)  # both are true if the task ends with the last step allowed
        return SimulatorStep(self._seen(observation), float(reward), bool(terminated), is_late, success)

    def render(self) -> np.ndarray:
        picture = self.environments[self._current].render()
        if not isinstance(picture, np.ndarray):
            raise UserError("env.kwargs: set render_mode to rgb_array, without which gymnasium draws no picture")
        return picture.astype(np.uint8)

    def close(self) -> None:
        for environment in self.environments:
            environment.close()

    def _success(self, info: Mapping[str, Any], terminated: bool, reward: float) -> bool | None:
        """Tell whether the task is accomplished. None: the environment does not say so."""
        said = info.get("success", info.get("is_success"))
        return None if said is None else bool(said)

    def _seen(self, observation: Any) -> Observation:
        if self._describe is not None:
            return self._describe(self.environments[self._current], observation)
        return seen_of(self._spaces[self._current], observation)


make = GymSimulator


def seen_of(space: Any, observation: Any) -> Observation:
    """Sort an observation of any space of gymnasium into state, picture and words."""
    state: list[np.ndarray] = []
    words: list[str] = []
    image = None
    for part, value in _leaves(space, observation):
        kind = type(part).__name__
        if kind == "Box" and len(part.shape) == 3 and part.dtype == np.uint8:
            image = np.asarray(value)
        elif kind in ("Text", "MissionSpace"):
            words.append(str(value))
        else:
            state.append(np.asarray(value, dtype=np.float32).reshape(-1))
    return Observation(text=" ".join(words), state=np.concatenate(state) if state else None, image=image)


def _leaves(space: Any, value: Any) -> list[tuple[Any, Any]]:
    """List the spaces inside of a space, in a fixed order, with their values; None for a value: none are given."""
    kind = type(space).__name__
    if kind == "Dict":
        pairs = [(part, None if value is None else value[name]) for name, part in sorted(space.spaces.items())]
    elif kind == "Tuple":
        pairs = [(part, None if value is None else value[at]) for at, part in enumerate(space.spaces)]
    elif kind in ("Box", "Discrete", "MultiDiscrete", "MultiBinary", "Text", "MissionSpace"):
        return [(space, value)]
    else:
        raise UserError(f"observations of kind {kind} are not read: use a wrapper that makes a Box of them")
    return [leaf for part, inside in pairs for leaf in _leaves(part, inside)]


def _state_bounds(space: Any) -> tuple[np.ndarray, np.ndarray] | None:
    low: list[np.ndarray] = []
    high: list[np.ndarray] = []
    for part, _ in _leaves(space, None):
        kind = type(part).__name__
        if kind == "Box" and not (len(part.shape) == 3 and part.dtype == np.uint8):
            lowest, highest = (np.asarray(bound, dtype=np.float32).reshape(-1) for bound in (part.low, part.high))
            has_low, has_high = lowest > -_NO_BOUND, highest < _NO_BOUND
            # Where only one side has a bound, the other is at least UNBOUNDED away from it.
            low.append(np.where(has_low, lowest, np.where(has_high, np.minimum(highest, 0), 0) - UNBOUNDED))
            high.append(np.where(has_high, highest, np.where(has_low, np.maximum(lowest, 0), 0) + UNBOUNDED))
        elif kind == "Discrete":
            low.append(np.array([part.start], dtype=np.float32))
            high.append(np.array([part.start + part.n - 1], dtype=np.float32))
        elif kind in ("MultiDiscrete", "MultiBinary"):
            sizes = np.asarray(getattr(part, "nvec", np.full(part.shape, 2))).reshape(-1)
            low.append(np.zeros(len(sizes), dtype=np.float32))
            high.append((sizes - 1).astype(np.float32))
    return (np.concatenate(low), np.concatenate(high)) if low else None


def _num_values(space: Any) -> int | None:
    """Return the largest number of values of a numbered entry; None: there is no such entry."""
    leaves = [part for part, _ in _leaves(space, None)]
    counts = [int(part.n) for part in leaves if type(part).__name__ == "Discrete"]
    counts += [int(np.max(part.nvec)) for part in leaves if type(part).__name__ == "MultiDiscrete"]
    return max(counts, default=None)


def _action_spec(space: Any) -> ActionSpec:
    kind = type(space).__name__
    if kind == "Discrete":
        return ActionSpec.numbered(int(space.n))
    if kind == "Box" and np.isfinite(space.low).all() and np.isfinite(space.high).all():
        low, high = space.low.reshape(-1).astype(float), space.high.reshape(-1).astype(float)
        return ActionSpec(tuple(low.tolist()), tuple(high.tolist()))
    raise UserError(f"actions of {space!r} are not supported: Discrete ones are, and a Box with finite bounds")
