"""`hotseat play`: one episode of a config's agent, shown as it goes, without training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from hotseat.agents.transcript import decode, decode_after
from hotseat.config import Config
from hotseat.errors import UserError
from hotseat.loop.offline.answering import Answerer, Outcome, prepare
from hotseat.loop.settings.rollout_settings import rollout_sampling
from hotseat.observe import LiveView
from hotseat.rollout.engine import Engine
from hotseat.types import Completion, Request
from hotseat.words import label_text

Show = Callable[[str, Literal["about", "read", "sampled"]], object]


class Transcribed:
    """Shows what the policy reads and what it samples, request by request, token by token as the engine has it."""

    def __init__(self, tokenizer: Any, show: Show):
        self._tokenizer = tokenizer
        self._show = show
        self._lock = threading.Lock()  # completions come from the engine's thread
        self._numbers: dict[str, int] = {}
        self._known: list[tuple[int, ...]] = []  # contexts with their answers, by number from 1

    def submit(self, engine: Engine, request: Request) -> Future[Completion]:
        self._asked(request)
        future = engine.submit(request)

        def when_done(done: Future[Completion]) -> None:
            if not done.cancelled() and done.exception() is None:
                self._answered(request, done.result())

        future.add_done_callback(when_done)
        return future

    def _asked(self, request: Request) -> None:
        with self._lock:
            self._numbers[request.id] = len(self._numbers) + 1
            tokens = request.token_ids
            earlier = (known for known in self._known if known and tokens[: len(known)] == known)
            before = max(earlier, key=len, default=())
            new = tokens[len(before) :]
            text = decode_after(self._tokenizer, before, new) if before else decode(self._tokenizer, new)
            after = f"after answer {self._known.index(before) + 1}" if before else "a new context"
            self._show(f"request {self._numbers[request.id]}, {after}: {len(new)} new tokens", "about")
            self._show(text, "read")

    def _answered(self, request: Request, completion: Completion) -> None:
        with self._lock:
            number = self._numbers[request.id]
            while len(self._known) < number:
                self._known.append(())
            self._known[number - 1] = request.token_ids + completion.token_ids
            length = len(completion.token_ids)
            self._show(f"answer {number}: {length} tokens, ended by {completion.finish}", "about")
            self._show(decode_after(self._tokenizer, request.token_ids, completion.token_ids), "sampled")


def play(config: Config, number: int, logs: Path, view: LiveView, show: Show) -> Outcome:
    """Play the episode of one prompt, as the first sample of a run's first pass over the data would be."""
    with view:
        prepared = prepare(config, view)
        if not 0 <= number < len(prepared.prompts):
            raise UserError(f"--prompt {number}: there are {len(prepared.prompts):,} prompts, numbered from 0")
        transcribed = Transcribed(prepared.tokenizer, show)
        answerer = Answerer(prepared, logs, view, needs_reward=False, submit=transcribed.submit)
    with closing(answerer):
        prompt = prepared.prompts[number]
        label = "" if label_text(prompt.label) is None else f", label {prompt.label!r}"
        show(f"prompt {number}{label}", "about")
        show(prompt.text, "read")
        [(_, [outcome])] = answerer.answer([prompt], 0, 1, rollout_sampling(prepared.config))
    return outcome
