"""Joins the texts of concurrent requests, so that a model scores many at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from hotseat.words import quantity

_CHARACTERS_PER_TOKEN = 4  # of usual text, to guess how much to tokenize at a time


class Rejected(Exception):
    """Texts that the model cannot score; the message says which and why."""


class ScoresTexts(Protocol):
    """The parts of a reward model that a batcher uses."""

    max_length: int | None

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]: ...

    def score(self, sequences: Sequence[Sequence[int]]) -> list[float]: ...


@dataclass(frozen=True)
class Scored:
    """The rewards of a request, and its number of tokens."""

    rewards: list[float]
    num_tokens: int


@dataclass(frozen=True)
class Round:
    """Size of one round of scoring: texts, tokens without padding, and forwards."""

    num_texts: int
    num_tokens: int
    num_forwards: int


@dataclass
class _Request:
    texts: list[str]
    future: asyncio.Future[Scored]

    @property
    def num_characters(self) -> int:
        return sum(map(len, self.texts))


class Batcher:
    """Scores requests in rounds: each takes what has arrived meanwhile, up to about `max_tokens`, in one go.

    Takes requests from `submit` and gives each its rewards. `run` is the background task: it waits for the first
    request, has a thread of its own score the round, and ends when it is cancelled. Nothing waits for a batch to fill.
    A request that cannot be tokenized or scored is `Rejected` alone; a model that raises fails all of a round.

    note: is called after each round.
    """

    def __init__(self, model: ScoresTexts, max_tokens: int, note: Callable[[Round], object]):
        self._model = model
        self._max_tokens = max_tokens
        self._note = note
        self._waiting: deque[_Request] = deque()
        self._arrived = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        """Requests that no round has taken yet."""
        return len(self._waiting)

    async def submit(self, texts: list[str]) -> Scored:
        """Return the rewards of texts. Raises `Rejected`, or what the model raised."""
        request = _Request(texts, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._arrived.set()
        return await request.future

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, thread_name_prefix="reward-model") as thread:
            while True:
                await self._arrived.wait()
                requests = self._take()
                if not requests:
                    self._arrived.clear()
                    continue
                try:
                    results, facts = await loop.run_in_executor(thread, self._score, [each.texts for each in requests])
                except Exception as error:
                    results, facts = [error] * len(requests), None
                for request, result in zip(requests, results, strict=True):
                    if request.future.done():
                        continue  # its client is gone
                    if isinstance(result, Scored):
                        request.future.set_result(result)
                    else:
                        request.future.set_exception(result)
                if facts is not None:
                    self._note(facts)

    def _take(self) -> list[_Request]:
        """Take requests in the order of their arrival, up to about `max_tokens`, but at least one."""
        taken: list[_Request] = []
        left = self._max_tokens * _CHARACTERS_PER_TOKEN
        while self._waiting and (not taken or self._waiting[0].num_characters <= left):
            taken.append(self._waiting.popleft())
            left -= taken[-1].num_characters
        return taken

    def _score(self, requests: Sequence[list[str]]) -> tuple[list[Scored | Exception], Round]:
        sequences, problems = self._tokenized(requests)
        good = [tokens for each, problem in zip(sequences, problems, strict=True) if problem is None for tokens in each]
        rewards = [0.0] * len(good)
        pieces = cut_by_padded_tokens([len(tokens) for tokens in good], self._max_tokens)
        for piece in pieces:
            for index, reward in zip(piece, self._model.score([good[index] for index in piece]), strict=True):
                rewards[index] = reward
        each_reward = iter(rewards)
        results: list[Scored | Exception] = [
            Scored([next(each_reward) for _ in each], sum(map(len, each))) if problem is None else Rejected(problem)
            for each, problem in zip(sequences, problems, strict=True)
        ]
        return results, Round(len(good), sum(map(len, good)), len(pieces))

    def _tokenized(self, requests: Sequence[list[str]]) -> tuple[list[list[list[int]]], list[str | None]]:
        """Return the token sequences of each request, and why it cannot be scored, None if it can."""
        try:
            tokens = iter(self._model.tokenize([text for texts in requests for text in texts]))
        except Exception as error:
            if len(requests) == 1:
                return [[]], [f"the texts in 'query' cannot be tokenized: {type(error).__name__}: {error}"]
            alone = [self._tokenized([texts]) for texts in requests]  # whose fault it is
            return [sequences for [sequences], _ in alone], [problem for _, [problem] in alone]
        sequences = [[next(tokens) for _ in texts] for texts in requests]
        return sequences, [self._problem(each) for each in sequences]

    def _problem(self, sequences: Sequence[Sequence[int]]) -> str | None:
        for number, tokens in enumerate(sequences):
            if not tokens:
                return f"query[{number}] is empty: it has no tokens"
            if self._model.max_length is not None and len(tokens) > self._model.max_length:
                return (
                    f"query[{number}] has {quantity(len(tokens), 'token')}, and the longest text has"
                    f" {self._model.max_length:,}: a shortened text would get another reward"
                )
        return None


def cut_by_padded_tokens(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut sequences into batches, those of like length together: number times longest is at most `max_tokens`.

    Returns indices. A sequence that is longer is a batch by itself.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        # Longest first, so the first of a batch is its longest.
        if not batches or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > max_tokens:
            batches.append([])
        batches[-1].append(index)
    return batches
