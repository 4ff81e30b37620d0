"""Plays episodes in simulators: the agent of a rollout host whose role is env.

A host's simulators are divided into stages. The simulators of a stage step together, once each of them has its actions;
while the policy samples for one stage, another steps. Stages step one after another, as they are served by the policy:
side by side both would end later, then reach the policy together, be answered together, and never overlap again. Which
stage plays an episode, and what is beside it, changes nothing in it: its simulator depends on task, seed and actions
alone, and every request has a seed of its own.

Each chunk of actions is a segment: the observation as tokens, with its image if the policy sees, then the sampled
tokens of the actions.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from hotseat import faults
from hotseat.agents.agent import Agent, AgentError, SampleFunction
from hotseat.data.frames import FramePreparer, film_of_pictures
from hotseat.data.images import load_processor
from hotseat.envs.env import Env, Outcome
from hotseat.envs.family_loading import SimulatorSettings
from hotseat.envs.processes import ProcessEnv, SimulatorError
from hotseat.envs.simulator import ActionSpec, Observation
from hotseat.envs.tokens import NumberTokens
from hotseat.errors import UserError
from hotseat.loop.workers.records import MAX_FRAMES
from hotseat.types import (
    Completion,
    Episode,
    EpisodeFacts,
    Moved,
    Prompt,
    SampleKey,
    Sampling,
    ScoredEpisode,
    Segment,
    TurnFacts,
)
from hotseat.vision import placeholder_ids

EVAL_SEED = 1_000_000  # the first of the held-out seeds; those to learn from begin at 0
SUCCESS = "success"
_DRAW_IF_ASKED = ("gym", "babyai")  # families that draw pictures for people if they are made for it
_MAX_TRIED = 1000  # actions before a run, to find out whether a simulator reports success


@dataclass(frozen=True)
class SimulationSettings:
    """Settings of the simulators of one rollout host."""

    simulator: SimulatorSettings
    num_envs: int
    num_stages: int
    num_processes: int  # of each stage
    chunk: int
    bins: int
    timeout_s: float
    is_success_rewarded: bool  # instead of the simulator's rewards
    has_turn_rewards: bool  # rewards count where they came, not at the end of the episode
    bootstraps: bool  # a critic values the last observation of an episode that ran out of time
    images_for: str | None = None  # model whose processor prepares the simulator's images; None: the policy sees none
    trust_remote_code: bool = False  # of that processor
    has_action_rewards: bool = False  # those of turns are of single actions instead of chunks
    num_films: int = 0  # recorded samples at a time that are played again for a film


def simulation_prompts(
    settings: SimulationSettings, tokenizer: Any, max_length: int, seeds: Iterable[Iterable[int]]
) -> list[list[Prompt]]:
    """Return prompts for each set of seeds: one for each task and seed, which its label names. Its source is the task.

    Its tokens and images are the first observation of the task under seed 0. Raises for a simulator that cannot be
    started, or whose observations the policy cannot read.
    """
    env = ProcessEnv(settings.simulator, 1, timeout_s=settings.timeout_s)
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
    if settings.num_films:
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


def _refuse_unknown_success(settings: SimulationSettings, env: Env) -> None:
    """Act in slot 0 until the simulator says whether the task is accomplished, or the episode ends without."""
    actions = np.array(env.action.low, dtype=np.float64)[None, None]  # [1, 1, D]
    for _ in range(_MAX_TRIED):
        outcome = env.step([0], actions)
        if 0 in outcome.failures:
            raise UserError(f"env.path: {outcome.failures[0]}")
        if outcome.is_success_known[0]:
            return
        if outcome.terminated[0] or outcome.truncated[0]:
            raise _unknown_success(settings)


def _unknown_success(settings: SimulationSettings) -> UserError:
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
        self._env = ProcessEnv(simulator, 1, timeout_s=settings.timeout_s)
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
class Context:
    """The part of an observation that the policy reads."""

    token_ids: list[int]
    images: tuple[str, ...] = ()  # of the placeholders among the tokens


def _placeholders(model: str, trust_remote_code: bool) -> tuple[int, ...]:
    from transformers import AutoConfig

    return placeholder_ids(AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code))


class Reader:
    """Turns observations into what the policy reads, and tokens into actions."""

    def __init__(self, settings: SimulationSettings, tokenizer: Any, max_length: int, env: Env):
        self._name = settings.simulator.path
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._frames = None
        placeholders: tuple[int, ...] = ()
        if settings.images_for is not None:
            processor = load_processor(settings.images_for, tokenizer, settings.trust_remote_code)
            self._frames = FramePreparer(processor)
            placeholders = _placeholders(settings.images_for, settings.trust_remote_code)
        self._placeholders = placeholders
        self.actions = NumberTokens.of_actions(env.action, settings.bins, len(tokenizer), placeholders)
        self.num_sampled = settings.chunk * env.action.dim  # tokens of a chunk
        self._states = None
        if env.state_bounds is not None:
            low, high = env.state_bounds
            spec = ActionSpec(tuple(low.tolist()), tuple(high.tolist()))
            self._states = NumberTokens.of_actions(spec, settings.bins, len(tokenizer), placeholders)
        if env.num_state_values is not None and env.num_state_values > settings.bins:
            raise UserError(
                f"env.bins {settings.bins}: a number in the observations of {self._name} has {env.num_state_values}"
                f" values, and some would look alike: set it to {env.num_state_values} or more"
            )
        self._tokens_of = lru_cache(maxsize=65536)(self._tokenize)  # worlds look alike again and again

    def _tokenize(self, words: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(words, add_special_tokens=False)["input_ids"])

    def read(self, seen: Observation) -> Context:
        """Return the tokens of an observation: its image, instruction and words, then the state in bins."""
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
        return Context(token_ids, images)

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


class Stage:
    """Simulators that step together, called from one event loop.

    A call waits until every episode of the stage waits for its simulator; then all of them are carried out in a thread,
    which the stages of a host share.
    """

    def __init__(self, env: Env, thread: ThreadPoolExecutor):
        self.env = env
        self._thread = thread
        self._playing: set[int] = set()  # slots with an episode
        self._left: set[int] = set()  # slots whose episode has ended and is not forgotten yet
        self._resets: dict[int, tuple[int, int, asyncio.Future[Any]]] = {}
        self._steps: dict[int, tuple[np.ndarray, asyncio.Future[Any]]] = {}
        self._is_busy = False

    async def reset(self, slot: int, task: int, seed: int) -> Observation:
        self._playing.add(slot)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._resets[slot] = (task, seed, future)
        self._look()
        seen = await future
        if isinstance(seen, Exception):
            raise AgentError(str(seen))
        return seen

    async def step(self, slot: int, actions: np.ndarray) -> tuple[Outcome, int]:
        """Carry out a chunk, [K, D]; return the outcome of the whole stage and the row of this slot."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._steps[slot] = (actions, future)
        self._look()
        outcome, row = await future
        if slot in outcome.failures:
            raise AgentError(outcome.failures[slot])
        return outcome, row

    def leave(self, slot: int) -> None:
        """End the episode of a slot, however it ended."""
        self._playing.discard(slot)
        self._left.add(slot)
        self._resets.pop(slot, None)
        self._steps.pop(slot, None)
        self._look()

    def clear(self) -> None:
        """Forget all episodes, whose event loop has ended, once the call in progress is over."""
        self._thread.submit(self.env.forget, self._playing | self._left).result()
        self._playing.clear()
        self._left.clear()
        self._resets.clear()
        self._steps.clear()
        self._is_busy = False

    def close(self) -> None:
        self.env.close()

    def offload(self) -> Moved:
        """Offload the simulators, of which only those in the middle of an episode have anything to come back to."""
        ended, self._left = self._left, set()
        self._thread.submit(self.env.forget, ended).result()
        return self.env.offload()

    def _look(self) -> None:
        """Start the next call if nobody has to be waited for."""
        waiting = self._resets.keys() | self._steps.keys()
        if self._is_busy or not waiting or waiting != self._playing:
            return
        self._is_busy = True
        resets, self._resets = self._resets, {}
        steps, self._steps = self._steps, {}
        loop = asyncio.get_running_loop()
        ended, self._left = self._left, set()
        called = loop.run_in_executor(self._thread, self._call, ended, resets, steps)
        called.add_done_callback(lambda done: self._answer(done, resets, steps))

    def _call(self, ended: set[int], resets: dict[int, Any], steps: dict[int, Any]) -> tuple[list[Any], Outcome | None]:
        faults.reach("simulators.during")
        self.env.forget(ended)  # or they would be played again whenever their process is replaced
        begun: list[Any] = []
        if resets:
            slots = sorted(resets)
            begun = list(
                zip(
                    slots,
                    self.env.reset(slots, [resets[s][0] for s in slots], [resets[s][1] for s in slots]),
                    strict=True,
                )
            )
        if not steps:
            return begun, None
        slots = sorted(steps)
        return begun, self.env.step(slots, np.stack([steps[slot][0] for slot in slots]))

    def _answer(self, done: asyncio.Future[Any], resets: dict[int, Any], steps: dict[int, Any]) -> None:
        self._is_busy = False
        error = done.exception() if not done.cancelled() else asyncio.CancelledError()
        futures = {slot: waiting[-1] for slot, waiting in (resets | steps).items()}
        if error is not None:
            for future in futures.values():
                if not future.done():
                    future.set_exception(error)
            return
        begun, outcome = done.result()
        for slot, seen in begun:
            if not futures[slot].done():
                futures[slot].set_result(seen)
        for row, slot in enumerate(sorted(steps)):
            if not futures[slot].done():
                futures[slot].set_result((outcome, row))
        self._look()  # others may have come meanwhile


class Player(Agent):
    """Plays one episode for each prompt in a free simulator of any stage."""

    makes_checked_episodes = True  # of what the engine returned

    def __init__(self, settings: SimulationSettings, tokenizer: Any, max_length: int):
        self.name = settings.simulator.path
        self.num_films = settings.num_films
        self._settings = settings
        size = settings.num_envs // settings.num_stages
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="simulators")
        self._stages = [
            Stage(
                ProcessEnv(
                    settings.simulator,
                    size,
                    num_processes=settings.num_processes,
                    timeout_s=settings.timeout_s,
                    say=lambda text: print(text, file=sys.stderr, flush=True),
                ),
                self._thread,
            )
            for _ in range(settings.num_stages)
        ]
        self._reader = Reader(settings, tokenizer, max_length, self._stages[0].env)
        self._free: list[tuple[int, int]] = []
        self._films: Films | None = None  # made for the first of them
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all episodes, whose event loop has ended."""
        for stage in self._stages:
            stage.clear()
        size = self._settings.num_envs // len(self._stages)
        # Stages fill evenly.
        self._free = [(stage, slot) for slot in reversed(range(size)) for stage in reversed(range(len(self._stages)))]

    async def run(self, prompt: Prompt, key: SampleKey, sampling: Sampling, sample: SampleFunction) -> ScoredEpisode:
        assert isinstance(prompt.label, str), "a prompt without task and seed"
        task, seed = map(int, prompt.label.split("/"))
        index, slot = self._free.pop()
        stage = self._stages[index]
        try:
            return await self._play(stage, slot, task, seed, key, sampling, sample)
        finally:
            stage.leave(slot)
            self._free.append((index, slot))

    async def _play(
        self,
        stage: Stage,
        slot: int,
        task: int,
        seed: int,
        key: SampleKey,
        sampling: Sampling,
        sample: SampleFunction,
    ) -> ScoredEpisode:
        settings, reader = self._settings, self._reader
        dim = reader.num_sampled // settings.chunk
        sampling = replace(sampling, max_new_tokens=reader.num_sampled, ignore_eos=True, stop_token_ids=())
        seen = await stage.reset(slot, task, seed)
        instruction = seen.instruction
        segments: list[Segment] = []
        lengths: list[int] = []
        rewards: list[float] = []  # of chunks
        action_rewards: list[float] = []
        turns: list[TurnFacts] = []
        num_steps = num_outside = 0
        while True:
            context = reader.read(seen)
            completion = await sample(context.token_ids, sampling, len(segments), context.images)
            token_ids = completion.token_ids
            if len(token_ids) != reader.num_sampled:
                raise AgentError(f"the engine sampled {len(token_ids)} tokens for {settings.chunk} actions of {dim}")
            if completion.span_s is not None:
                turns.append(TurnFacts(*completion.span_s))
            num_outside += sum(not reader.actions.is_bin(token) for token in token_ids)
            outcome, row = await stage.step(slot, reader.actions.decode(token_ids))
            taken = int(outcome.num_taken[row])
            segments.append(_segment(context, completion, taken * dim))
            lengths.append(taken * dim)
            rewards.append(float(outcome.rewards[row].sum()))
            action_rewards += outcome.rewards[row, :taken].tolist()
            num_steps += taken
            after = outcome.seen[row]
            assert after is not None
            seen = after
            if outcome.terminated[row] or outcome.truncated[row]:
                break
        is_success, is_known = bool(outcome.success[row]), bool(outcome.is_success_known[row])
        is_truncated = bool(outcome.truncated[row] and not outcome.terminated[row])
        if settings.is_success_rewarded:
            if not is_known:
                raise _unknown_success(settings)
            rewards, action_rewards = (
                [0.0] * (len(each) - 1) + [float(is_success)] for each in (rewards, action_rewards)
            )
        if settings.bootstraps and is_truncated:
            segments.append(_value_segment(reader.read(seen)))
        verdict = (", success" if is_success else ", no success") if is_known else ""
        episode = Episode(
            key,
            tuple(segments),
            f"{instruction}\n{num_steps} actions{verdict}",
            is_truncated=is_truncated,
            turn_lengths=tuple(lengths),
            action_length=dim,
            has_bootstrap=settings.bootstraps and is_truncated,
            facts=EpisodeFacts(tuple(turns)),
        )
        extra = {"actions": float(num_steps), "tokens_outside": float(num_outside)}
        if is_known:
            extra[SUCCESS] = float(is_success)
        turn_rewards: tuple[float, ...] = ()
        if settings.has_turn_rewards:
            turn_rewards = tuple(action_rewards if settings.has_action_rewards else rewards)
        score = float(is_success) if is_known else sum(rewards)
        return ScoredEpisode(episode, sum(rewards), score, extra, turn_rewards)

    def film(self, label: str, episode: Episode) -> str | None:
        """Play an episode again from its task, its seed and its actions; None, with a note, if that fails."""
        task, seed = map(int, label.split("/"))
        tokens = [token for segment in episode.played_segments for token in segment.token_ids[segment.mask].tolist()]
        try:
            if self._films is None:
                self._films = Films(self._settings)
            return self._films.film(task, seed, self._reader.actions.decode(tokens))
        except (SimulatorError, UserError) as error:
            print(f"no film of {episode.key}: {error}", file=sys.stderr, flush=True)
            return None

    def offload(self) -> Moved:
        return _total(stage.offload() for stage in self._stages)

    def onload(self) -> Moved:
        return _total(stage.env.onload() for stage in self._stages)

    def end(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        for stage in self._stages:
            stage.close()
        if self._films is not None:
            self._films.close()


def _total(moves: Iterable[Moved]) -> Moved:
    total = Moved(0, 0, 0.0)
    for moved in moves:
        total = total + moved
    return total


def _segment(context: Context, completion: Completion, num_learned: int) -> Segment:
    """Return an observation and its actions. Tokens of actions after the end of the episode are not learned."""
    start = len(context.token_ids)
    length, end = start + len(completion.token_ids), start + num_learned
    mask = np.zeros(length, dtype=bool)
    mask[start:end] = True
    log_probs = np.zeros(length, dtype=np.float32)
    log_probs[start:end] = completion.log_probs[:num_learned]
    versions = np.full(length, -1, dtype=np.int32)
    versions[start:end] = completion.versions[:num_learned]
    token_ids = np.array([*context.token_ids, *completion.token_ids], dtype=np.int64)
    # By numpy, because torch takes longer to make tensors this small than a simulator to step.
    tensors = [torch.from_numpy(array) for array in (token_ids, mask, log_probs, versions)]
    return Segment(tensors[0], tensors[1], tensors[2], tensors[3], context.images)


def _value_segment(context: Context) -> Segment:
    """Return an observation whose value is that of its last token: a value is given what precedes its token."""
    token_ids = torch.tensor([*context.token_ids, context.token_ids[-1]])
    nothing = torch.zeros(len(token_ids), dtype=torch.bool)
    versions = torch.full((len(token_ids),), -1, dtype=torch.int32)
    return Segment(token_ids, nothing, torch.zeros(len(token_ids)), versions, context.images)
