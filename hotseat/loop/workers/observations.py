"""Observations of simulators: as what the policy reads, as prompts of a run, and as films for people."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from hotseat.config.schema.rollout_options import EnvConfig
from hotseat.data.frames import FramePreparer, film_of_pictures
from hotseat.data.images import load_processor
from hotseat.envs.family_loading import SimulatorSettings
from hotseat.envs.processes import ProcessEnv, SimulatorError
from hotseat.envs.simulator import ActionSpec, Observation
from hotseat.envs.tokens import NumberTokens
from hotseat.errors import UserError
from hotseat.loop.workers.records import MAX_FRAMES
from hotseat.model_source import ModelSource
from hotseat.numeric.float_tokens import FloatTokens, ids_of
from hotseat.types import Prompt
from hotseat.vision import placeholder_ids

EVAL_SEED = 1_000_000  # the first of the held-out seeds; those to learn from begin at 0
SUCCESS = "success"
_DRAW_IF_ASKED = ("gym", "babyai")  # families that draw pictures for people if they are made for it
_MAX_TRIED = 1000  # actions before a run, to find out whether a simulator reports success


@dataclass(frozen=True)
class SimulationSettings:
    """Settings of the simulators of one rollout host."""

    simulator: SimulatorSettings
    env: EnvConfig
    num_stages: int
    has_turn_rewards: bool  # rewards count where they came, not at the end of the episode
    bootstraps: bool  # a critic values the last observation of an episode that ran out of time
    images_for: ModelSource | None = None  # whose processor prepares its images; None: the policy sees none
    has_action_rewards: bool = False  # those of turns are of single actions instead of chunks

    @property
    def is_success_rewarded(self) -> bool:
        """Tell whether an episode is rewarded for success, not by its simulator."""
        return self.env.reward == "success"


def simulation_prompts(
    settings: SimulationSettings, tokenizer: Any, max_length: int, seeds: Iterable[Iterable[int]]
) -> list[list[Prompt]]:
    """Return prompts for each set of seeds: one for each task and seed, which its label names. Its source is the task.

    Its tokens and images are the first observation of the task under seed 0. Raises for a simulator that cannot be
    started, or whose observations the policy cannot read.
    """
    env = ProcessEnv(settings.simulator, 1, timeout_s=settings.env.step_timeout_s)
    try:
        reader = Reader(settings, tokenizer, max_length, env)
        first = []
        for task in env.tasks:
            [seen] = env.reset([0], [task.index], [0])
            if isinstance(seen, Exception):
                raise UserError(f"env.path: {seen}")
            first.append(reader.read(seen))
            if settings.is_success_rewarded:
                _refuse_unknown_success(settings, env)
    finally:
        env.close()
    if settings.env.films:
        films = Films(settings)
        try:
            films.begin(0, 0)
        except (SimulatorError, UserError, ImportError) as error:
            raise UserError(f"env.films: {error}") from None
        finally:
            films.close()
    pairs = ([(task, seed) for seed in each for task in env.tasks] for each in seeds)
    return [
        [
            Prompt(
                at,
                f"{task.name} {seed}",
                tuple(first[task.index].token_ids),
                f"{task.index}/{seed}",
                task.name,
                first[task.index].images,
            )
            for at, (task, seed) in enumerate(each)
        ]
        for each in pairs
    ]


def _refuse_unknown_success(settings: SimulationSettings, env: ProcessEnv) -> None:
    """Act in slot 0 until the simulator says whether the task is accomplished, or the episode ends without."""
    actions = np.array(env.action.low, dtype=np.float64)[None, None]  # [1, 1, D]
    for _ in range(_MAX_TRIED):
        outcome = env.step([0], actions)
        if 0 in outcome.failures:
            raise UserError(f"env.path: {outcome.failures[0]}")
        if outcome.is_success_known[0]:
            return
        if outcome.terminated[0] or outcome.truncated[0]:
            raise unknown_success(settings)


def unknown_success(settings: SimulationSettings) -> UserError:
    return UserError(
        f"env.reward: success, but {settings.simulator.path} does not say whether an episode of"
        f" {', '.join(settings.simulator.tasks) or 'its tasks'} succeeds (info has neither success nor is_success): set"
        " env.reward to simulator"
    )


class Films:
    """Plays episodes again in a simulator of its own, which draws a picture after every action."""

    def __init__(self, settings: SimulationSettings):
        simulator = settings.simulator
        if simulator.path in _DRAW_IF_ASKED:
            simulator = replace(simulator, kwargs={"render_mode": "rgb_array", **simulator.kwargs})
        self._env = ProcessEnv(simulator, 1, timeout_s=settings.env.step_timeout_s)
        if self._env.is_on_device:
            self.close()
            raise UserError(f"{simulator.path} holds memory of a device, which the actor has when films are made")

    def begin(self, task: int, seed: int) -> np.ndarray:
        """Begin an episode, and return its first picture."""
        import PIL.Image  # noqa: F401 -- of which films are made

        [seen] = self._env.reset([0], [task], [seed])
        if isinstance(seen, Exception):
            raise seen
        return self._picture()

    def film(self, task: int, seed: int, actions: np.ndarray) -> str:
        """Return a film of the episode of a task and a seed in which these actions are taken: [num_actions, D]."""
        pictures = [self.begin(task, seed)]
        for action in actions[: MAX_FRAMES - 1]:
            outcome = self._env.step([0], action[None, None])
            if outcome.failures:
                raise SimulatorError(outcome.failures[0])
            pictures.append(self._picture())
        return film_of_pictures(pictures)

    def _picture(self) -> np.ndarray:
        [picture] = self._env.render([0])
        if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
            raise SimulatorError(f"render returned {picture.dtype} {picture.shape}: it must be uint8 [H, W, 3]")
        return picture

    def close(self) -> None:
        self._env.close()


@dataclass(frozen=True)
class PolicyInput:
    """The part of an observation that the policy reads."""

    token_ids: list[int]
    images: tuple[str, ...] = ()  # of the placeholders among the tokens


class Reader:
    """Turns observations into what the policy reads, and tokens into actions."""

    def __init__(self, settings: SimulationSettings, tokenizer: Any, max_length: int, env: ProcessEnv):
        self._name = settings.simulator.path
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._frames = None
        placeholders: tuple[int, ...] = ()
        if settings.images_for is not None:
            processor = load_processor(settings.images_for, tokenizer)
            self._frames = FramePreparer(processor)
            placeholders = placeholder_ids(settings.images_for.config())
        self._placeholders = placeholders
        self.is_numeric: bool = getattr(tokenizer, "reads_numbers", False)
        self.num_sampled = settings.env.chunk * env.action.dim  # tokens of a chunk
        self.actions: NumberTokens | FloatTokens
        if self.is_numeric:
            if env.action.num_values is not None:
                raise UserError(
                    f"env.path {self._name}: its actions are numbered, and a Gaussian policy samples vectors: choose a"
                    " simulator with vectors of actions, or a language model"
                )
            self.actions = FloatTokens(np.array(env.action.low), np.array(env.action.high))
            return
        self.actions = NumberTokens.of_actions(env.action, settings.env.bins, len(tokenizer), placeholders)
        self._states = None
        if env.state_bounds is not None:
            low, high = env.state_bounds
            spec = ActionSpec(tuple(low.tolist()), tuple(high.tolist()))
            self._states = NumberTokens.of_actions(spec, settings.env.bins, len(tokenizer), placeholders)
        if env.num_state_values is not None and env.num_state_values > settings.env.bins:
            raise UserError(
                f"env.bins {settings.env.bins}: a number in the observations of {self._name} has {env.num_state_values}"
                f" values, and some would look alike: set it to {env.num_state_values} or more"
            )
        self._tokens_of = lru_cache(maxsize=65536)(self._tokenize)  # worlds look alike again and again

    def _tokenize(self, words: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(words, add_special_tokens=False)["input_ids"])

    def read(self, seen: Observation) -> PolicyInput:
        """Return the tokens of an observation: its image, instruction and words, then the state in bins."""
        if self.is_numeric:
            return self._read_numbers(seen)
        token_ids = self._encode(seen)
        images: tuple[str, ...] = ()
        if self._frames is not None:
            if seen.image is None:
                raise UserError(
                    f"env.images: the observations of {self._name} have no images: unset it, or ask the simulator for"
                    " them by env.kwargs"
                )
            frame = self._frames.prepare(seen.image)
            token_ids, images = [*frame.token_ids, *token_ids], (frame.image,)
            if token_ids[-1] in self._placeholders:
                raise UserError(
                    f"env.path {self._name}: its observations are pictures alone, and engines continue text: use a"
                    " simulator with an instruction, words or numbers, or a policy that writes a token after images"
                )
        elif not token_ids or (seen.image is not None and seen.state is None and not seen.text):
            raise UserError(
                f"env.path {self._name}: its observations are pictures alone: set env.images, and choose a policy that"
                " sees, or use a simulator with words or numbers"
            )
        room = self._max_length - self.num_sampled
        if len(token_ids) > room:
            raise UserError(
                f"data.max_length {self._max_length}: an observation of {self._name} has {len(token_ids)} tokens, and"
                f" its actions {self.num_sampled}: set it to {len(token_ids) + self.num_sampled} or more"
            )
        return PolicyInput(token_ids, images)

    def _read_numbers(self, seen: Observation) -> PolicyInput:
        """Return the state alone, number by number: such a policy reads neither words nor images."""
        if seen.state is None:
            raise UserError(f"env.path {self._name}: its observations have no numbers, and actor.model reads no others")
        width = len(seen.state) + self.num_sampled
        if width >= self._max_length:
            raise UserError(
                f"data.max_length {self._max_length}: a state of {self._name} has {len(seen.state)} numbers, and its"
                f" actions {self.num_sampled}: set it to {width + 1} or more"
            )
        return PolicyInput(ids_of(seen.state).tolist())

    def _encode(self, seen: Observation) -> list[int]:
        words = " ".join(part for part in (seen.instruction, seen.text) if part)
        token_ids = list(self._tokens_of(words)) if words else []
        if seen.state is not None:
            if self._states is None:
                raise UserError(
                    f"env.path {self._name}: its observations have numbers, and its state_bounds are None: set them to"
                    " the lowest and the highest value of each number"
                )
            token_ids += self._states.encode(seen.state)
        return token_ids
