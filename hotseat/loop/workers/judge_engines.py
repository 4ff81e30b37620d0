"""The judge's engines as a rollout host sees them: verdicts are requests like those of episodes, to another model."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from hotseat.cluster import WorkerGroup, reports_death
from hotseat.errors import HotseatError, RunError
from hotseat.failed import Failed
from hotseat.loop.workers.engine_client import EngineClient, TakesRequests
from hotseat.rewards.judge import CutOff
from hotseat.types import Request, Sampling

_PLACE = "\ue000the text\ue000"  # stands for a message's text in a rendered template; no text has these characters


class JudgeEngines:
    """Has engines write verdicts, as `rewards.judge.WritesVerdicts`.

    One thread runs the event loop of the requests. It takes them from `ask`, in any thread; a request waits for one of
    `max_open` places, and then for its engine, at most `timeout_s`. A request that an engine refuses or does not finish
    is `Failed`. If no engine is left, all that wait raise its death, which `check` raises too. `close` ends the thread.

    tokenizer: of the judge. With a chat template the request is a user's message, without one plain text.
    """

    def __init__(
        self,
        engines: WorkerGroup[TakesRequests],
        client: str,
        tokenizer: Any,
        *,
        max_length: int,
        max_open: int,
        timeout_s: float,
    ):
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._lost: Exception | None = None
        self._is_closing = False
        self._closing = threading.Lock()  # held while a request is given to the event loop
        self._tasks: set[asyncio.Task[Any]] = set()
        self._client = EngineClient(engines, client, timeout_s=timeout_s, when_lost=self._lose)
        self._places = asyncio.Semaphore(max_open)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="judge", daemon=True)
        self._thread.start()

    def ask(self, body: Mapping[str, Any], name: str) -> Future[str | Failed]:
        """Send a chat completion request; return what the judge writes, "" or `CutOff` if it is cut off."""
        with self._closing:
            if self._is_closing:
                raise RunError("judge: closed")
            return asyncio.run_coroutine_threadsafe(self._write(body, name), self._loop)

    def check(self) -> None:
        """Raise the death of an engine, if one died."""
        if self._lost is not None:
            raise self._lost

    def close(self) -> None:
        """End all requests. A second call does nothing."""
        with self._closing:
            if self._is_closing:
                return
            self._is_closing = True

        async def cancel() -> None:
            self._lost = self._lost or RunError("judge: closed before it gave all verdicts")
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(cancel(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _lose(self, error: Exception, is_any_left: bool) -> None:
        self._lost = error
        if not is_any_left:
            for task in self._tasks:
                task.cancel()

    async def _write(self, body: Mapping[str, Any], name: str) -> str | Failed:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            async with self._places:
                return await self._complete(body, name)
        except asyncio.CancelledError:
            raise self._lost or RunError("judge: closed before it gave all verdicts") from None
        finally:
            self._tasks.discard(task)

    async def _complete(self, body: Mapping[str, Any], name: str) -> str | Failed:
        if self._lost is not None and not self._client.has_engines:
            raise self._lost
        [message] = body["messages"]
        token_ids = request_tokens(self._tokenizer, message["content"])
        room = self._max_length - len(token_ids)
        if room < 1:
            limit = f"reward.judge.engine.max_length is {self._max_length}"
            return Failed(f"the request to the judge has {len(token_ids)} tokens, and {limit} (sample {name})")
        sampling = Sampling(max_new_tokens=min(body["max_tokens"], room), temperature=body["temperature"])
        request = Request(f"{self._client.name}/{next(self._numbers)}", token_ids, sampling, body.get("seed", 0))
        try:
            completion = await self._client.generate(request)
        except HotseatError as error:
            if reports_death(error):
                raise
            return Failed(f"the judge's engine: {error} (sample {name})")
        if completion.finish == "length" and room < body["max_tokens"]:
            limit = f"reward.judge.engine.max_length is {self._max_length}"
            return CutOff(
                f"the judge was cut off before its end: its request has {len(token_ids)} tokens, and {limit}, which"
                f" leaves {room} of the {body['max_tokens']} of reward.judge.max_tokens"
            )
        if completion.finish != "stop":
            return ""  # what looks like a verdict there may be a thought
        return str(self._tokenizer.decode(list(completion.token_ids), skip_special_tokens=True))


def request_tokens(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Return the tokens of a request: a user's message if the tokenizer has a chat template, otherwise plain text.

    Special tokens come from the template alone. Those that the text spells out are split into plain ones: an answer
    could otherwise end its message, and write the judge's verdict itself.
    """
    if tokenizer.chat_template is None:
        return tuple(tokenizer(text, split_special_tokens=True)["input_ids"])
    messages = [{"role": "user", "content": _PLACE}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    before, _, after = rendered.partition(_PLACE)
    parts = ((before, False), (text, True), (after, False))
    return tuple(
        token
        for part, is_split in parts
        for token in tokenizer(part, add_special_tokens=False, split_special_tokens=is_split)["input_ids"]
    )
