"""The open episodes of an executor: their requests to the engine, and what is learned from them."""

from __future__ import annotations

import asyncio
import contextvars
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hotseat.agents.agent import AgentError, SampleFunction
from hotseat.agents.image_preparer import ImagePreparer, listed
from hotseat.agents.multi_turn import MultiTurn, TurnResult, Turns, number
from hotseat.agents.transcript import decode, decode_after
from hotseat.algorithms.routing import GrowingRouting
from hotseat.errors import UnsupportedError, UserError
from hotseat.openrlhf.agents.agent_turns import InstanceTurns, logs_of
from hotseat.openrlhf.agents.sampling_params import read_back
from hotseat.types import (
    Completion,
    Episode,
    EpisodeFacts,
    Prompt,
    SampleKey,
    Sampling,
    ScoredEpisode,
    Segment,
    TurnFacts,
    WhenSampled,
)
from hotseat.vision import PreparedImage

_MAX_UNCLAIMED = 65536  # completions of a server's calls that no episode has returned yet

CURRENT_EPISODE: contextvars.ContextVar[ExecutorEpisode | None] = contextvars.ContextVar("episode", default=None)


def current_episode(name: str) -> ExecutorEpisode:
    """Return the episode in whose `execute` this code runs. name: of what needs it, for the error if there is none."""
    episode = CURRENT_EPISODE.get()
    if episode is None:
        raise UnsupportedError(
            f"{name} was called outside of AgentExecutor.execute, from another thread or a server: this version cannot"
            " tell which episode such a call belongs to"
        )
    return episode


@dataclass(eq=False)
class EngineCall:
    """A request to the engine and its completion. episode: as whose it was sampled. user: who learns from it."""

    episode: ExecutorEpisode
    context: tuple[int, ...]
    completion: Completion
    images: tuple[PreparedImage, ...] = ()  # those in the context
    user: ExecutorEpisode | None = None


class OpenEpisodes:
    """The open episodes of an executor, for its calls from a server, which do not say whose they are.

    Such a call is sampled as if it were of an open episode that it may be of. Whoever returns its tokens as actions
    learns from it: equal tokens are as good as each other. preparer: of a VLM's images.
    """

    def __init__(self, preparer: ImagePreparer | None = None) -> None:
        self.preparer = preparer
        self._open: list[ExecutorEpisode] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self.calls: deque[EngineCall] = deque(maxlen=_MAX_UNCLAIMED)

    @contextmanager
    def opened(self, episode: ExecutorEpisode) -> Iterator[None]:
        """Count an episode among the open ones inside the context."""
        self._loop = asyncio.get_running_loop()
        self._open.append(episode)
        try:
            yield
        finally:
            self._open.remove(episode)
            unclaimed = [call for call in self.calls if call.user is None] if self._open else []
            self.calls.clear()
            self.calls.extend(unclaimed)

    def is_open(self, episode: ExecutorEpisode) -> bool:
        return episode in self._open

    async def look(self, multi_modal_data: Any, prompt: Prompt | None) -> tuple[PreparedImage, ...]:
        """Prepare the images of a call. Without any, they are those of the prompt, if it is known."""
        if multi_modal_data is None:
            return () if prompt is None else tuple(map(PreparedImage.of_file, prompt.images))
        if self.preparer is None:
            raise AgentError("generate with multi_modal_data, and the run has no images: set data.image_key")
        if not isinstance(multi_modal_data, Mapping):
            raise UserError(
                f"generate with multi_modal_data of type {type(multi_modal_data).__name__}: it must be a dict, as in"
                ' {"image": [...]}'
            )
        if others := sorted(set(multi_modal_data) - {"image"}):
            raise UnsupportedError(f"generate with multi_modal_data of {', '.join(others)}: only images are possible")
        images = listed(multi_modal_data.get("image"))
        prepared = {path for episode in self._open for path in episode.prompt.images}
        known = [isinstance(image, str) and image in prepared for image in images]
        num_known = sum(known)
        looked = iter(
            await self.preparer.prepare_all(
                [i for i, is_known in zip(images, known, strict=True) if not is_known], num_known
            )
        )
        return tuple(
            PreparedImage.of_file(image) if is_known else next(looked)
            for image, is_known in zip(images, known, strict=True)
        )

    def expanded(self, token_ids: Sequence[int], images: Sequence[PreparedImage]) -> tuple[int, ...]:
        """Return tokens with all that stand for each image, of which they may have one or all."""
        if self.preparer is None:
            return tuple(token_ids)
        return tuple(self.preparer.expand(self.preparer.collapse(token_ids, images), images)[0])

    async def generate(self, token_ids: list[int], params: Any, images: tuple[PreparedImage, ...]) -> Any:
        """Sample for a call from any thread, in the event loop of the episodes."""
        if self._loop is None or not self._open:
            raise AgentError("llm_engine.generate was called while no episode was open")
        sampling = asyncio.run_coroutine_threadsafe(self._generate(token_ids, params, images), self._loop)
        return await asyncio.wrap_future(sampling)

    async def _generate(self, token_ids: list[int], params: Any, images: tuple[PreparedImage, ...]) -> Any:
        episode = self._likely(self.expanded(token_ids, images))
        return await episode.generate(token_ids, params, images, self.calls)

    def _likely(self, token_ids: tuple[int, ...]) -> ExecutorEpisode:
        """Return the open episode that a call continues; else one of the same prompt, or any, that asked least."""
        for call in reversed(self.calls):
            start, end = len(call.context), len(call.context) + len(call.completion.token_ids)
            if call.episode not in self._open or len(token_ids) < end:
                continue
            if token_ids[:start] == call.context and token_ids[start:end] == tuple(call.completion.token_ids):
                return call.episode
        same = [each for each in self._open if token_ids[: len(each.prompt.token_ids)] == each.prompt.token_ids]
        return min(same or self._open, key=lambda each: each.num_asked)


@dataclass(eq=False)
class ExecutorEpisode:
    """One episode of an executor: its requests to the engine and their completions."""

    tokenizer: Any
    prompt: Prompt
    key: SampleKey
    sampling: Sampling
    sample: SampleFunction
    limits: dict[str, Any]
    open_episodes: OpenEpisodes
    put: Any = None
    calls: list[EngineCall] = field(default_factory=list)
    num_asked: int = 0

    async def generate(
        self,
        token_ids: list[int],
        params: Any,
        images: tuple[PreparedImage, ...] = (),
        calls: deque[EngineCall] | None = None,
    ) -> Any:
        """Sample for a call of this episode. calls: where to record it instead."""
        token_ids = list(self.open_episodes.expanded(token_ids, images))
        completion = await self._ask(token_ids, read_back(params, self.sampling), images)
        call = EngineCall(self, tuple(token_ids), completion, images)
        if calls is None:
            self.calls.append(call)
        else:
            calls.append(call)
        output = types.SimpleNamespace(
            text=decode_after(self.tokenizer, token_ids, completion.token_ids),
            token_ids=list(completion.token_ids),
            logprobs=[
                {token: types.SimpleNamespace(logprob=log_prob)}
                for token, log_prob in zip(completion.token_ids, completion.log_probs, strict=True)
            ],
            finish_reason=completion.finish,
        )
        return types.SimpleNamespace(
            request_id=completion.request_id, prompt_token_ids=token_ids, outputs=[output], finished=True
        )

    async def play(self, agent_instance_cls: Any, text: str, label: Any, params: Any) -> dict[str, Any]:
        """Play the turns as OpenRLHF's own `execute` does, and return a dict in its format."""
        prompt = replace(self.prompt, label=label)
        if text != prompt.text:
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            ids = self.open_episodes.expanded(ids, tuple(map(PreparedImage.of_file, prompt.images)))
            prompt = replace(prompt, text=text, token_ids=ids)
        make_turns = _OneTurn if agent_instance_cls is None else lambda: InstanceTurns(agent_instance_cls)
        agent = MultiTurn.of_turns(make_turns, self.tokenizer, preparer=self.open_episodes.preparer, **self.limits)
        played = await agent.run(prompt, self.key, read_back(params, self.sampling), self._sample)
        scored = played if isinstance(played, ScoredEpisode) else None
        episode = played.episode if isinstance(played, ScoredEpisode) else played
        (segment,) = episode.segments
        sampled, ranges = segment.mask.nonzero().squeeze(1).tolist(), []
        for length in episode.turn_lengths:
            ranges.append((sampled[0], sampled[0] + length))
            sampled = sampled[length:]
        return {
            "prompt": text,
            "label": label,
            "reward": None if scored is None else scored.reward,
            "scores": None if scored is None else scored.score,
            "observation_tokens": segment.token_ids.tolist(),
            "action_ranges": ranges,
            "rollout_log_probs": segment.log_probs.tolist(),
            "truncated": episode.is_truncated,
            "extra_logs": {} if scored is None else dict(scored.extra),
            "turn_rewards": () if scored is None else scored.turn_rewards,
        }

    def from_result(self, result: Any) -> Episode | ScoredEpisode:
        """Build the episode that an executor's dict describes, or several: its segments, which share one reward."""
        if not isinstance(result, list | tuple):
            return self._from_one(result)
        if not result:
            raise AgentError("AgentExecutor.execute returned an empty list")
        parts = [self._from_one(each) for each in result]
        rewards = {part.reward if isinstance(part, ScoredEpisode) else None for part in parts}
        if len(rewards) > 1:
            raise AgentError(
                "AgentExecutor.execute returned samples with different rewards; they are one episode, with one reward"
            )
        episodes = [part.episode if isinstance(part, ScoredEpisode) else part for part in parts]
        whole = replace(
            episodes[-1],
            segments=tuple(segment for episode in episodes for segment in episode.segments),
            turn_lengths=tuple(length for episode in episodes for length in episode.turn_lengths),
            facts=EpisodeFacts(tuple(turn for episode in episodes if episode.facts for turn in episode.facts.turns)),
        )
        last = parts[-1]
        return replace(last, episode=whole, turn_rewards=()) if isinstance(last, ScoredEpisode) else whole

    def _from_one(self, result: Any) -> Episode | ScoredEpisode:
        if not isinstance(result, Mapping):
            raise AgentError(f"AgentExecutor.execute returned a {type(result).__name__}, not a dict")
        for name in ("observation_tokens", "action_ranges"):
            if name not in result:
                raise AgentError(f"AgentExecutor.execute returned a dict without {name!r}; it has: {', '.join(result)}")
        tokens = [int(token) for token in result["observation_tokens"]]
        ranges = [(int(begin), int(end)) for begin, end in result["action_ranges"]]
        if not ranges:
            raise AgentError("AgentExecutor.execute returned no action_ranges")
        segment, lengths, images, turns = self._segment(tokens, ranges)
        episode = Episode(
            self.key,
            (segment,) if lengths else (),  # nothing is left to learn where other samples have the same tokens
            self._query(tokens, images),
            bool(result.get("truncated", False)),
            lengths,
            EpisodeFacts(turns),
        )
        if result.get("reward") is None:
            return episode
        reward = number("reward", result["reward"])
        score = reward if result.get("scores") is None else number("scores", result["scores"])
        turn_rewards = tuple(result.get("turn_rewards", ()))
        if len(turn_rewards) != len(ranges) or sum(turn_rewards) != reward:
            turn_rewards = ()  # the executor changed the reward, so the turns' no longer sum up to it
        return ScoredEpisode(episode, reward, score, logs_of(result.get("extra_logs")), turn_rewards)

    def _query(self, tokens: list[int], images: Sequence[PreparedImage]) -> str:
        """Return tokens as text, with one token for each image."""
        preparer = self.open_episodes.preparer
        prompt: Sequence[int] = self.prompt.token_ids
        if preparer is not None:
            tokens = preparer.collapse(tokens, images)
            prompt = preparer.collapse(prompt, tuple(map(PreparedImage.of_file, self.prompt.images)))
        if tokens[: len(prompt)] != list(prompt):
            return decode(self.tokenizer, tokens)
        return self.prompt.text + decode_after(self.tokenizer, prompt, tokens[len(prompt) :])

    def _segment(
        self, tokens: list[int], ranges: list[tuple[int, int]]
    ) -> tuple[Segment, tuple[int, ...], tuple[PreparedImage, ...], tuple[TurnFacts, ...]]:
        """Return the tokens up to the last action, the lengths and times of the actions learned, and the images."""
        lengths, turns = [], []
        end = ranges[-1][1]
        prompted = tuple(map(PreparedImage.of_file, self.prompt.images))
        last = self._call(tokens, *ranges[-1], prompted)
        images = last[0].images
        calls = [(*self._call(tokens, begin, stop, images), begin, stop) for begin, stop in ranges[:-1]]
        calls.append((*last, *ranges[-1]))
        if self.open_episodes.preparer is not None:
            if any(call.images != images[: len(call.images)] for call, *_ in calls):
                raise AgentError("AgentExecutor.execute returned actions that were sampled after different images")
            tokens = [*calls[-1][0].context, *tokens[ranges[-1][0] : end]]
            calls = [
                (call, is_new, len(call.context), len(call.context) + stop - begin)
                for call, is_new, begin, stop in calls
            ]
            end = len(tokens)
        mask = torch.zeros(end, dtype=torch.bool)
        log_probs = torch.zeros(end, dtype=torch.float32)
        versions = torch.full((end,), -1, dtype=torch.int32)
        routing = GrowingRouting()
        for call, is_new, begin, stop in calls:
            routing.add(call.completion.routing, stop)
            if not is_new:
                continue
            completion = call.completion
            lengths.append(stop - begin)
            if completion.span_s is not None:
                turns.append(TurnFacts(*completion.span_s))
            mask[begin:stop] = True
            log_probs[begin:stop] = torch.tensor(completion.log_probs)
            versions[begin:stop] = torch.tensor(completion.versions, dtype=torch.int32)
        paths = tuple(image.path for image in images)
        token_ids = torch.tensor(tokens[:end], dtype=torch.int64)
        segment = Segment(token_ids, mask, log_probs, versions, paths, routing.of(end))
        return segment, tuple(lengths), images, tuple(turns)

    def _call(
        self, tokens: list[int], begin: int, end: int, images: tuple[PreparedImage, ...]
    ) -> tuple[EngineCall, bool]:
        """Return the call that sampled an action, and whether this is the first time that the episode has it.

        images: those that it was probably sampled after, or the first of them: the same tokens may have been sampled
        after others, too, also in another episode.
        """
        fitting = [call for call in (*self.calls, *self.open_episodes.calls) if self._fits(call, tokens, begin, end)]
        if self.open_episodes.preparer is not None:
            fitting.sort(key=lambda call: any(one != other for one, other in zip(call.images, images, strict=False)))
        for call in fitting:
            if call.user is None:
                call.user = self
                return call, True
        for call in fitting:
            if call.user is self:
                return call, False
        raise AgentError(
            f"AgentExecutor.execute says that tokens {begin} to {end} are an action, but that is not what the engine"
            " sampled there"
        )

    def _fits(self, call: EngineCall, tokens: list[int], begin: int, end: int) -> bool:
        """Tell whether an action and what precedes it are those of a call, whichever way images are written."""
        if self.open_episodes.preparer is not None:
            preparer, context = self.open_episodes.preparer, call.context
            return call.completion.token_ids == tuple(tokens[begin:end]) and preparer.collapse(
                tokens[:begin], call.images
            ) == preparer.collapse(context, call.images)
        return len(call.context) == begin and (*call.context, *call.completion.token_ids) == tuple(tokens[:end])

    async def _sample(
        self,
        token_ids: list[int],
        sampling: Sampling,
        turn: int,
        images: tuple[str, ...] | None = None,
        when_sampled: WhenSampled | None = None,
    ) -> Completion:
        shown = tuple(map(PreparedImage.of_file, images or ()))
        completion = await self._ask(token_ids, sampling, shown)
        self.calls.append(EngineCall(self, tuple(token_ids), completion, shown))
        return completion

    async def _ask(self, token_ids: list[int], sampling: Sampling, images: tuple[PreparedImage, ...]) -> Completion:
        self.num_asked += 1
        seen = () if self.open_episodes.preparer is None else (tuple(image.path for image in images),)
        return await self.sample(token_ids, sampling, self.num_asked - 1, *seen)


class _OneTurn(Turns):
    async def begin(self, prompt: Prompt, seed: int) -> str | None:
        return None

    async def act(self, observation: str, action: str, sampling: Sampling) -> TurnResult:
        return TurnResult("", True)
