"""Agents that are programs: they talk to the policy over HTTP, as to any OpenAI endpoint, and keep their own messages.

A program decides what it asks and in which order, and says at the end what the episode is worth. The gateway, in the
process of the rollout host, records what the engine sampled; the episode is made of that (`branches.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hotseat.agents.agent import Agent, AgentError, SampleFunction, episode_seed
from hotseat.agents.branches import Answer, in_order, segments_of
from hotseat.agents.environments.environment_worker import PolicyClient
from hotseat.agents.episode_output import current_log
from hotseat.agents.gateway.gateway_server import Gateway
from hotseat.agents.gateway.message_images import content_of
from hotseat.agents.gateway.program_session import ProgramSession, ServedPolicy
from hotseat.agents.multi_turn import number
from hotseat.agents.per_loop import PerLoop
from hotseat.agents.programs import Preload, ProgramHost, environment
from hotseat.agents.transcript import decode
from hotseat.processes import exit_words
from hotseat.types import Episode, EpisodeFacts, Prompt, SampleKey, Sampling, ScoredEpisode, TurnFacts

_MAX_RESULT_BYTES = 1 << 20
_MAX_SHOWN = 400  # characters of what a failed program wrote
_RESULT_KEYS = ("reward", "score", "extra", "turn_rewards")


class BlackBox(Agent):
    """An agent whose episodes are played by something that talks to the gateway. Subclasses say by what."""

    makes_checked_episodes = True
    samples_by_itself = True

    def __init__(self, policy: ServedPolicy):
        self._policy, self._settings = policy, policy.settings
        max_image_bytes = 0 if policy.preparer is None else policy.preparer.max_image_bytes
        self._gateways = PerLoop(lambda: Gateway(self._settings.bind, self._settings.advertise_url, max_image_bytes))

    async def run(
        self, prompt: Prompt, key: SampleKey, sampling: Sampling, sample: SampleFunction
    ) -> Episode | ScoredEpisode:
        session = ProgramSession(self._policy, sample, sampling, prompt)
        gateway = self._gateways.here()
        api_key = await gateway.open(session)
        try:
            seed = episode_seed(key, self._settings.run_seed)
            tokenizer, preparer = self._policy.tokenizer, self._policy.preparer
            token = "" if preparer is None else decode(tokenizer, [preparer.image_token_id])
            content = content_of(prompt.text, token, len(prompt.images))
            client = PolicyClient(f"{gateway.url}/v1", api_key, gateway.url, seed, content=content)
            result = await _unless_failed(self.play(prompt, client), session)
        except Exception:
            if not session.is_out_of_time or session.failure.done():
                raise
            result = None  # the program could not go on without the policy: the run scores what there is
        finally:
            gateway.end(api_key)
        return await self._policy.work(len(session.conversation.text), _episode, session, key, result)

    async def play(self, prompt: Prompt, client: PolicyClient) -> Any:
        """Play one episode and return its result: None, a number, or a mapping with some of `_RESULT_KEYS`."""
        raise NotImplementedError(f"{type(self).__name__}.play")

    async def close(self) -> None:
        """Close the gateway of the running event loop. The next episode opens another one."""
        gateway = self._gateways.take()
        if gateway is not None:
            await gateway.close()


class Program(BlackBox):
    """Runs a command for each episode, in a fresh folder. Its result is the file that $HOTSEAT_RESULT names."""

    runs_here = False

    def __init__(self, policy: ServedPolicy):
        super().__init__(policy)
        assert self._settings.command is not None, "a program without a command"
        # Words that name files here become absolute paths: a program has a folder of its own.
        first, *words = self._settings.command
        self._command = [
            os.path.abspath(shutil.which(first) or first),
            *(os.path.abspath(word) if os.path.isfile(word) else word for word in words),
        ]
        self._programs = PerLoop(_Opening)
        modules, passed_on = self._settings.preload, self._settings.passed_on
        self._preload = Preload(tuple(self._command), modules, passed_on) if modules else None
        self.name = " ".join(self._settings.command)

    async def play(self, prompt: Prompt, client: PolicyClient) -> Any:
        programs = await self._opened()
        async with programs.folder() as folder:
            result = folder / "hotseat_result.json"
            own = {
                "OPENAI_BASE_URL": client.base_url,
                "OPENAI_API_KEY": client.api_key,
                "ANTHROPIC_BASE_URL": client.root_url,
                "ANTHROPIC_API_KEY": client.api_key,
                "HOTSEAT_RESULT": str(result),
            }
            env = environment(folder, self._settings.passed_on, own)
            task: dict[str, Any] = {"prompt": prompt.text, "label": prompt.label, "seed": client.seed}
            if prompt.images:
                task["content"] = client.content
            try:
                code, written = await programs.run(self._command, folder, env, json.dumps(task).encode() + b"\n")
            except OSError as error:
                raise AgentError(f"the program cannot be started: {error}") from None
            if written and (log := current_log.get()) is not None:
                log.write(f"{written}\n")
            if code != 0:
                raise AgentError(
                    f"the program ended with {exit_words(code)}" + (f": {written[-_MAX_SHOWN:]}" if written else "")
                )
            return _read_result(result, written)

    async def _opened(self) -> ProgramHost:
        opening = self._programs.here()
        if opening.host is None:
            make = partial(ProgramHost, self._settings.containers, preload=self._preload)
            made = asyncio.get_running_loop().run_in_executor(None, make)
            opening.host = asyncio.ensure_future(made)
        awaited = opening.host
        try:
            return await asyncio.shield(awaited)
        except Exception:
            if opening.host is awaited:
                opening.host = None  # the next episode tries again
            raise

    async def close(self) -> None:
        await super().close()
        opening = self._programs.take()
        if opening is not None and opening.host is not None:
            programs = await opening.host
            await asyncio.get_running_loop().run_in_executor(None, programs.close)


@dataclass(eq=False)
class _Opening:
    """The programs of one event loop. host: made by the first episode."""

    host: asyncio.Future[ProgramHost] | None = None


async def _unless_failed(play: Any, session: ProgramSession) -> Any:
    """Return what the program returns, or end it and raise as soon as the engine fails one of its requests."""
    playing = asyncio.ensure_future(play)
    try:
        await asyncio.wait({playing, session.failure}, return_when=asyncio.FIRST_COMPLETED)
        if session.failure.done():
            raise session.failure.result()
        return playing.result()
    finally:
        if not playing.done():
            playing.cancel()
            with contextlib.suppress(BaseException):  # its error is not the reason
                await playing


def _episode(session: ProgramSession, key: SampleKey, result: Any) -> Episode | ScoredEpisode:
    session.check()
    asked = session.conversation.answers
    answers = in_order(asked)
    segments, learned = segments_of(answers)
    lengths = tuple(len(answer.completion.token_ids) for answer in learned)
    is_cut = session.is_cut or session.is_out_of_time
    spans = [(answer.completion.span_s, answer.tool_calls) for answer in learned]
    facts = EpisodeFacts(tuple(TurnFacts(*span, calls) for span, calls in spans if span is not None))
    episode = Episode(key, segments, session.conversation.text, is_cut, lengths, facts)
    if result is None:
        return episode
    if not isinstance(result, Mapping):
        result = {"reward": result}
    unknown = sorted(str(name) for name in result if name not in _RESULT_KEYS)
    if unknown:
        raise AgentError(f"the result has {', '.join(unknown)}; it may have {', '.join(_RESULT_KEYS)}")
    total, turn_rewards = _rewards(result, asked, learned)
    if total is None:
        alone = sorted(str(name) for name in result if result[name] is not None and result[name] != {})
        if alone:
            raise AgentError(f"the result has {', '.join(alone)} without a reward; the run's own reward has its own")
        return episode
    score = total if result.get("score") is None else number("the score of the result", result["score"])
    extra = result.get("extra") or {}
    if not isinstance(extra, Mapping):
        raise AgentError(f"extra of the result is a {type(extra).__name__}, not numbers by name")
    numbers = {str(name): number(f"extra[{name!r}]", value, is_log=True) for name, value in extra.items()}
    return ScoredEpisode(episode, total, score, numbers, turn_rewards)


def _rewards(
    result: Mapping[str, Any], asked: Sequence[Answer], learned: Sequence[Answer]
) -> tuple[float | None, tuple[float, ...]]:
    """Return the reward of a result, and those of its turns in the order of the segments.

    asked: all answers, in the order in which the program got them, which is that of its `turn_rewards`. Where some of
    them are not learned from, the sum alone counts.
    """
    reward = None if result.get("reward") is None else number("the reward of the result", result["reward"])
    rewards = result.get("turn_rewards")
    if rewards is None:
        return reward, ()
    if not isinstance(rewards, Sequence) or isinstance(rewards, str | bytes) or len(rewards) != len(asked):
        shown = f"{len(rewards)} numbers" if isinstance(rewards, list | tuple) else f"a {type(rewards).__name__}"
        raise AgentError(f"turn_rewards of the result is {shown}, not one for each of the {len(asked)} answers")
    numbers = [number(f"turn_rewards[{at}]", value) for at, value in enumerate(rewards)]
    total = sum(numbers)
    if reward is not None and not math.isclose(reward, total, rel_tol=1e-6, abs_tol=1e-6):
        raise AgentError(f"turn_rewards of the result sum up to {total:g}, but its reward is {reward:g}: leave one out")
    if len(learned) != len(asked):
        return total, ()
    by_answer = dict(zip(map(id, asked), numbers, strict=True))
    return total, tuple(by_answer[id(answer)] for answer in learned)


def _read_result(file: Path, written: str) -> Any:
    shown = f"; it wrote: {written[-_MAX_SHOWN:]}" if written else ""
    try:
        # Whatever the program made of it, opening it must not wait.
        opened = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise AgentError(f"the program did not write its result to the file $HOTSEAT_RESULT{shown}") from None
    except OSError as error:
        raise AgentError(f"the result file cannot be read: {error.strerror}{shown}") from None
    try:
        if not stat.S_ISREG(os.fstat(opened).st_mode):
            raise AgentError("the result file is not a file")
        raw = os.read(opened, _MAX_RESULT_BYTES + 1)
    finally:
        os.close(opened)
    if len(raw) > _MAX_RESULT_BYTES:
        raise AgentError(f"the result file has more than {_MAX_RESULT_BYTES >> 20} MiB")
    try:
        result = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise AgentError(f"the result file is not JSON: {error}{shown}") from None
    if not isinstance(result, dict | int | float) or isinstance(result, bool):
        raise AgentError(f"the result file has a {type(result).__name__}, neither an object nor a number")
    if isinstance(result, float) and not math.isfinite(result):
        raise AgentError(f"the result file has the number {result}")
    return result
