"""An engine that says what it is told to, and what is learned of its answers."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from chat_templates import STOPS, tokenizer_of

from hotseat.agents.black_box import BlackBox
from hotseat.agents.blocking_calls import OwnThread
from hotseat.agents.environments.environment_worker import PolicyClient
from hotseat.agents.gateway.program_session import ServedPolicy
from hotseat.types import Completion, Episode, Failed, Prompt, Request, SampleKey, Sampling, ScoredEpisode, Segment

WAIT_S = 300.0
KEY = SampleKey(0, 3, 1)
SAMPLING = Sampling(max_new_tokens=50, temperature=0.7)
Outcome = Episode | ScoredEpisode | Failed


def learned(segments: tuple[Segment, ...], lengths: tuple[int, ...]) -> Counter:
    """Count the answers that are learned: the tokens before each, its own, their log-probs and versions."""
    counted: Counter = Counter()
    left = list(lengths)
    for segment in segments:
        tokens, mask = segment.token_ids.tolist(), segment.mask.tolist()
        at = 0
        while True in mask[at:]:
            at = mask.index(True, at)
            end = at + left.pop(0)
            assert all(mask[at:end])
            facts = (tuple(segment.log_probs[at:end].tolist()), tuple(segment.versions[at:end].tolist()))
            counted[tuple(tokens[:at]), tuple(tokens[at:end]), *facts] += 1
            at = end
        assert mask[-1], "tokens after the last sampled one"
        assert not any(segment.log_probs[~segment.mask])
    assert not left
    return counted


class PlayFunction(BlackBox):
    """Plays by a function `play(prompt, client)` in the process of the test. A plain one runs in a thread."""

    def __init__(self, function: Callable[..., Any], policy: ServedPolicy):
        super().__init__(policy)
        self._function = function

    async def play(self, prompt: Prompt, client: PolicyClient) -> Any:
        thread = OwnThread("play")
        try:
            return await thread.call(self._function, prompt, client)
        finally:
            thread.end()


class Engine:
    """Says what it is told to, the answer of each request by its number, and counts what it sampled."""

    def __init__(self, *answers: str, name: str = "smollm2"):
        self.requests: list[Request] = []
        self.sampled: Counter = Counter()
        self.aborted: list[str] = []
        self.is_holding = False  # answer nothing
        self.held: list[Future[Completion]] = []  # what was not answered
        self.asked = threading.Event()
        self._answers = answers or ("cab",)
        self._name = name

    def __call__(self, request: Request) -> Future[Completion]:
        text = self._answers[min(len(self.requests), len(self._answers) - 1)]
        self.requests.append(request)
        self.asked.set()
        future: Future[Completion] = Future()
        if self.is_holding:
            self.held.append(future)
            return future
        if text == "dies":
            future.set_exception(RuntimeError("the engine died"))
            return future
        cut = ""
        if not text.endswith("|>"):  # it has its stop token
            text, _, cut = text.partition("|")  # "text|cut" was cut at the limit
            text += "" if cut else STOPS[self._name]
        ids = tuple(tokenizer_of(self._name)(text, add_special_tokens=False)["input_ids"])
        facts = tuple(-0.5 - at / 4 for at in range(len(ids))), (len(self.requests),) * len(ids)
        self.sampled[request.token_ids, ids, *facts] += 1
        future.set_result(Completion(request.id, ids, *facts, "length" if cut else "stop"))
        return future

    @property
    def contexts(self) -> list[str]:
        return [tokenizer_of(self._name).decode(request.token_ids) for request in self.requests]


def processes_of(folder: Path) -> set[int]:
    """Processes that work in a folder."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{name}/cwd").startswith(str(folder)):
                found.add(int(name))
    return found
