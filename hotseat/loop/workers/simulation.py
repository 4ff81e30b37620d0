"""Plays episodes in simulators: the agent of a rollout host whose role is env.

A host's simulators are divided into stages. The simulators of a stage step together, once each of them has its actions;
while the policy samples for one stage, another steps. Stages step one after another, as they are served by the policy:
side by side both would end later, then reach the policy together, be answered together, and never overlap again. Which
stage plays an episode, and what is beside it, changes nothing in it: its simulator depends on task, seed and actions
alone, and every request has a seed of its own.

Each chunk of actions is a segment: the observation as tokens, with its image if the policy sees, then the sampled
tokens of the actions. Under a policy that acts in numbers, which reads nothing but the last observation, the chunks of
an episode are one segment: they take a hundredth of the objects.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from hotseat import faults
from hotseat.agents.agent import Agent, AgentError, SampleFunction
from hotseat.envs.processes import Outcome, ProcessEnv, SimulatorError
from hotseat.envs.simulator import Observation
from hotseat.errors import UserError
from hotseat.loop.workers.observations import SUCCESS, Films, PolicyInput, Reader, SimulationSettings, unknown_success
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


class SimulatorStage:
    """Simulators that step together, called from one event loop.

    A call waits until every episode of the stage waits for its simulator; then all of them are carried out in a thread,
    which the stages of a host share.
    """

    def __init__(self, env: ProcessEnv, thread: ThreadPoolExecutor):
        self.env = env
        self._thread = thread
        self._playing: set[int] = set()  # slots with an episode
        self._left: set[int] = set()  # slots whose episode has ended and is not forgotten yet
        # By slot: the next task and seed, or the next chunk of actions, and its outcome.
        self._waiting: dict[int, tuple[tuple[int, int] | np.ndarray, asyncio.Future[Any]]] = {}
        self._is_busy = False

    async def reset(self, slot: int, task: int, seed: int) -> Observation:
        self._playing.add(slot)
        seen = await self._ask(slot, (task, seed))
        if isinstance(seen, Exception):
            raise AgentError(str(seen))
        return seen

    async def step(self, slot: int, actions: np.ndarray) -> tuple[Outcome, int]:
        """Carry out a chunk, [K, D]; return the outcome of the whole stage and the row of this slot."""
        outcome, row = await self._ask(slot, actions)
        if slot in outcome.failures:
            raise AgentError(outcome.failures[slot])
        return outcome, row

    def _ask(self, slot: int, request: tuple[int, int] | np.ndarray) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[slot] = request, future
        self._look()
        return future

    def leave(self, slot: int) -> None:
        """End the episode of a slot, however it ended."""
        self._playing.discard(slot)
        self._left.add(slot)
        self._waiting.pop(slot, None)
        self._look()

    def clear(self) -> None:
        """Forget all episodes, whose event loop has ended, once the call in progress is over."""
        self._thread.submit(self.env.forget, self._playing | self._left).result()
        self._playing.clear()
        self._left.clear()
        self._waiting.clear()
        self._is_busy = False

    def offload(self) -> Moved:
        """Offload the simulators, of which only those in the middle of an episode have anything to come back to."""
        ended, self._left = self._left, set()
        self._thread.submit(self.env.forget, ended).result()
        return self.env.offload()

    def _look(self) -> None:
        """Start the next call if nobody has to be waited for."""
        if self._is_busy or not self._waiting or self._waiting.keys() != self._playing:
            return
        self._is_busy = True
        waiting, self._waiting = self._waiting, {}
        ended, self._left = self._left, set()
        requests = {slot: request for slot, (request, _) in waiting.items()}
        futures = {slot: future for slot, (_, future) in waiting.items()}
        called = asyncio.get_running_loop().run_in_executor(self._thread, self._call, ended, requests)
        called.add_done_callback(lambda done: self._answer(done, futures))

    def _call(self, ended: set[int], requests: dict[int, Any]) -> dict[int, Any]:
        faults.reach("simulators.during")
        self.env.forget(ended)  # or they would be played again whenever their process is replaced
        answers: dict[int, Any] = {}
        resets = sorted(slot for slot, request in requests.items() if isinstance(request, tuple))
        if resets:
            tasks, seeds = map(list, zip(*(requests[slot] for slot in resets), strict=True))
            answers |= zip(resets, self.env.reset(resets, tasks, seeds), strict=True)
        if steps := sorted(requests.keys() - answers.keys()):
            outcome = self.env.step(steps, np.stack([requests[slot] for slot in steps]))
            answers |= {slot: (outcome, row) for row, slot in enumerate(steps)}
        return answers

    def _answer(self, done: asyncio.Future[dict[int, Any]], futures: dict[int, asyncio.Future[Any]]) -> None:
        self._is_busy = False
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        for slot in futures if error is not None else done.result():
            if futures[slot].done():
                continue
            if error is not None:
                futures[slot].set_exception(error)
            else:
                futures[slot].set_result(done.result()[slot])
        if error is None:
            self._look()  # others may have come meanwhile


@dataclass
class RewardShaping:
    """Rewards of an episode's actions as they are learned from: c·r, or c·r − c·r of the action before."""

    scale: float
    is_relative: bool
    _before: float = 0.0

    def shaped(self, rewards: Sequence[float]) -> list[float]:
        """Return the rewards of the next actions of the episode."""
        scaled = [self.scale * reward for reward in rewards]
        if not self.is_relative:
            return scaled
        before, self._before = self._before, scaled[-1]
        return [now - last for last, now in itertools.pairwise([before, *scaled])]


@dataclass
class _Played:
    """Chunks of an episode so far: a segment, its learned tokens and its reward each."""

    instruction: str
    shaping: RewardShaping
    segments: list[Segment] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    action_rewards: list[float] = field(default_factory=list)
    turns: list[TurnFacts] = field(default_factory=list)
    num_steps: int = 0
    num_outside: int = 0  # sampled tokens that stand for no number

    def add(self, context: PolicyInput, completion: Completion, outcome: Outcome, row: int, dim: int) -> None:
        """Add a chunk of actions of `dim` numbers each, and what came of them."""
        taken = int(outcome.num_taken[row])
        if completion.span_s is not None:
            self.turns.append(TurnFacts(*completion.span_s))
        self.segments.append(_segment(context, completion, taken * dim))
        self.lengths.append(taken * dim)
        of_actions = self.shaping.shaped(outcome.rewards[row, :taken].tolist())
        self.rewards.append(math.fsum(of_actions))
        self.action_rewards += of_actions
        self.num_steps += taken


class Player(Agent):
    """Plays one episode for each prompt in a free simulator of any stage."""

    makes_checked_episodes = True  # of what the engine returned
    runs_here = False

    def __init__(self, settings: SimulationSettings, tokenizer: Any, max_length: int):
        self.name = settings.simulator.path
        self.num_films = settings.env.films
        self._settings = settings
        size = settings.env.num_envs // settings.num_stages
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="simulators")
        self._stages = [
            SimulatorStage(
                ProcessEnv(
                    settings.simulator,
                    size,
                    num_processes=settings.env.num_processes,
                    timeout_s=settings.env.step_timeout_s,
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
        size = self._settings.env.num_envs // len(self._stages)
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
        stage: SimulatorStage,
        slot: int,
        task: int,
        seed: int,
        key: SampleKey,
        sampling: Sampling,
        sample: SampleFunction,
    ) -> ScoredEpisode:
        settings, reader = self._settings, self._reader
        dim = reader.num_sampled // settings.env.chunk
        sampling = replace(sampling, max_new_tokens=reader.num_sampled, ignore_eos=True, stop_token_ids=(), stop=())
        seen = await stage.reset(slot, task, seed)
        played = _Played(seen.instruction, RewardShaping(settings.env.reward_scale, settings.env.relative_rewards))
        while True:
            context = reader.read(seen)
            completion = await sample(context.token_ids, sampling, len(played.segments), context.images)
            token_ids = completion.token_ids
            if len(token_ids) != reader.num_sampled:
                raise AgentError(
                    f"the engine sampled {len(token_ids)} tokens for {settings.env.chunk} actions of {dim}"
                )
            played.num_outside += sum(not reader.actions.is_bin(token) for token in token_ids)
            outcome, row = await stage.step(slot, reader.actions.decode(token_ids))
            played.add(context, completion, outcome, row, dim)
            after = outcome.seen[row]
            assert after is not None
            seen = after
            if outcome.terminated[row] or outcome.truncated[row]:
                return self._scored(key, played, outcome, row, seen)

    def _scored(self, key: SampleKey, played: _Played, outcome: Outcome, row: int, last: Observation) -> ScoredEpisode:
        settings = self._settings
        is_success, is_known = bool(outcome.success[row]), bool(outcome.is_success_known[row])
        is_truncated = bool(outcome.truncated[row] and not outcome.terminated[row])
        rewards, action_rewards = played.rewards, played.action_rewards
        if settings.is_success_rewarded:
            if not is_known:
                raise unknown_success(settings)
            rewards, action_rewards = (
                [0.0] * (len(each) - 1) + [settings.env.reward_scale * is_success] for each in (rewards, action_rewards)
            )
        segments = [_joined(played.segments)] if self._reader.is_numeric else list(played.segments)
        has_bootstrap = settings.bootstraps and (is_truncated or settings.env.bootstrap_terminated)
        if has_bootstrap:
            # Numbers come in whole steps.
            count = self._reader.num_sampled if self._reader.is_numeric else 1
            segments.append(_value_segment(self._reader.read(last), count))
        verdict = (", success" if is_success else ", no success") if is_known else ""
        episode = Episode(
            key,
            tuple(segments),
            f"{played.instruction}\n{played.num_steps} actions{verdict}",
            is_truncated=is_truncated,
            turn_lengths=tuple(played.lengths),
            action_length=self._reader.num_sampled // settings.env.chunk,
            has_bootstrap=has_bootstrap,
            facts=EpisodeFacts(tuple(played.turns)),
        )
        extra = {"actions": float(played.num_steps), "tokens_outside": float(played.num_outside)}
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
        return sum((stage.offload() for stage in self._stages), start=Moved(0, 0, 0.0))

    def onload(self) -> Moved:
        return sum((stage.env.onload() for stage in self._stages), start=Moved(0, 0, 0.0))

    def end(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        for stage in self._stages:
            stage.env.close()
        if self._films is not None:
            self._films.close()


def _segment(context: PolicyInput, completion: Completion, num_learned: int) -> Segment:
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
    tensors: Any = map(torch.from_numpy, (token_ids, mask, log_probs, versions))
    return Segment(*(*tensors, context.images))


def _joined(segments: Sequence[Segment]) -> Segment:
    """Return segments without images as one, in their order."""
    each = ([getattr(segment, name) for segment in segments] for name in ("token_ids", "mask", "log_probs", "versions"))
    return Segment(*map(torch.cat, each))


def _value_segment(context: PolicyInput, count: int) -> Segment:
    """Return an observation and `count` further tokens, of which the last has its value.

    A value is given what precedes its token.
    """
    token_ids = torch.tensor([*context.token_ids, *[context.token_ids[-1]] * count])
    nothing = torch.zeros(len(token_ids), dtype=torch.bool)
    versions = torch.full((len(token_ids),), -1, dtype=torch.int32)
    return Segment(token_ids, nothing, torch.zeros(len(token_ids)), versions, context.images)
