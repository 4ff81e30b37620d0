"""Streams of answers: what clients read while the engine still samples, and that it is what is learned."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import aiohttp
import openai
import pytest
from chat_templates import STOPS, tokenizer_of
from gateway_cases import KEY, SAMPLING, WAIT_S, Outcome, PlayFunction, learned

from hotseat.agents import AgentHost, OpenRequests, ProgramSettings
from hotseat.agents.gateway.program_session import ServedPolicy
from hotseat.agents.gateway.reply import certain
from hotseat.types import Completion, Episode, Failed, Prompt, Request, ScoredEpisode, WhenSampled

QUESTION = [{"role": "user", "content": "bad?"}]
ANSWER = "ace bad cab dad " * 3


class Engine:
    """Samples as many tokens of its answer as the test says, when it says so. Its methods are called in any thread."""

    def __init__(self, answer: str = ANSWER, name: str = "smollm2"):
        self.token_ids = tuple(tokenizer_of(name)(answer + STOPS[name], add_special_tokens=False)["input_ids"])
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self._futures: list[Future[Completion]] = []
        self._listeners: list[tuple[asyncio.AbstractEventLoop, WhenSampled]] = []

    def listen(self, request_id: str, when_sampled: WhenSampled) -> None:
        self._listeners.append((asyncio.get_running_loop(), when_sampled))

    def __call__(self, request: Request) -> Future[Completion]:
        assert request.streams == (len(self._listeners) > len(self.requests))
        self._futures.append(Future())
        self.requests.append(request)  # who waits for the request finds its future
        return self._futures[-1]

    async def sample(self, number: int, token_ids: tuple[int, ...] = ()) -> None:
        """Report so many tokens in all of the last request."""
        while not self._listeners:
            await asyncio.sleep(0.005)
        loop, when_sampled = self._listeners[-1]
        loop.call_soon_threadsafe(when_sampled, (token_ids or self.token_ids)[:number])

    async def end(self, error: Exception | None = None) -> None:
        while not self._futures:
            await asyncio.sleep(0.005)
        if error is not None:
            self._futures[-1].set_exception(error)
            return
        facts = (tuple(-0.5 for _ in self.token_ids), tuple(3 for _ in self.token_ids))
        self._futures[-1].set_result(Completion(self.requests[-1].id, self.token_ids, *facts, "stop"))

    @property
    def sampled(self) -> set[tuple[int, ...]]:
        return {self.token_ids}


def play(function: Callable[..., Any], engine: Engine) -> Outcome:
    agent = PlayFunction(function, ServedPolicy(tokenizer_of("smollm2"), ProgramSettings(), 600))
    with AgentHost(
        agent, engine, run_seed=5, timeout_s=WAIT_S, requests=OpenRequests(engine.aborted.extend, engine.listen)
    ) as host:
        return host.submit(Prompt(3, "bad?", (1,), "7"), KEY, SAMPLING).result(WAIT_S)


async def chat(client: Any, **more: Any):
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as openai_client:
        stream = await openai_client.chat.completions.create(model="x", messages=QUESTION, stream=True, **more)
        async for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                yield chunk.choices[0].delta.content


async def completions(client: Any):
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as openai_client:
        async for chunk in await openai_client.completions.create(model="x", prompt="bad?", max_tokens=50, stream=True):
            yield chunk.choices[0].text


async def responses(client: Any):
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0) as openai_client:
        async for event in await openai_client.responses.create(model="x", input="bad?", stream=True):
            if event.type == "response.output_text.delta":
                yield event.delta
        assert event.type == "response.completed"
        assert event.response.output_text == ANSWER


async def messages(client: Any):
    import anthropic  # takes seconds, which a worker without this test is spared

    async with (
        anthropic.AsyncAnthropic(base_url=client.root_url, api_key=client.api_key, max_retries=0) as anthropic_client,
        anthropic_client.messages.stream(model="x", messages=QUESTION, max_tokens=50) as stream,
    ):
        async for text in stream.text_stream:
            yield text
        assert (await stream.get_final_message()).content[0].text == ANSWER


@pytest.mark.parametrize("read", [chat, completions, responses, pytest.param(messages, marks=pytest.mark.slow)])
def test_a_client_reads_tokens_as_they_are_sampled_and_they_are_learned(read):
    engine = Engine()

    async def program(prompt, client):
        texts = read(client)
        seen = await first_of(texts, engine.sample(2))
        assert len(seen) < len(ANSWER)
        assert ANSWER.startswith(seen)
        await engine.sample(6)
        more = await anext(texts)
        assert ANSWER.startswith(seen + more)
        await engine.end()
        assert seen + more + "".join([text async for text in texts]) == ANSWER
        return 1.0

    scored = play(program, engine)
    assert isinstance(scored, ScoredEpisode), scored
    counted = learned(scored.episode.segments, scored.episode.turn_lengths)
    assert [tokens for _, tokens, *_ in counted] == [engine.token_ids]


def test_the_next_turn_continues_a_streamed_answer_token_by_token():
    engine = Engine()

    async def program(prompt, client):
        texts = chat(client)
        seen = await first_of(texts, engine.sample(2))
        await engine.end()
        seen += "".join([text async for text in texts])
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {client.api_key}"}) as http:
            history = [*QUESTION, {"role": "assistant", "content": seen}, *QUESTION]
            asking = asyncio.ensure_future(http.post(f"{client.base_url}/chat/completions", json={"messages": history}))
            while len(engine.requests) < 2:
                await asyncio.sleep(0.005)
            await engine.end()
            await asking
        return 1.0

    scored = play(program, engine)
    assert isinstance(scored, ScoredEpisode), scored
    assert len(scored.episode.segments) == 1
    first, second = engine.requests
    assert second.token_ids[: len(first.token_ids) + len(engine.token_ids)] == first.token_ids + engine.token_ids


def test_a_stop_string_is_never_shown():
    engine = Engine("add\nObs: made up")

    async def program(prompt, client):
        reading = asyncio.ensure_future(_joined(chat(client, stop=["\nOb"])))
        for number in range(1, len(engine.token_ids)):
            await engine.sample(number)
        await engine.end()
        assert await reading == "add"
        return 1.0

    scored = play(program, engine)
    assert isinstance(scored, ScoredEpisode), scored
    [segment] = scored.episode.segments
    assert tokenizer_of("smollm2").decode(segment.token_ids[segment.mask]) == "add\nOb"


async def first_of(texts: Any, sampling: Awaitable[None]) -> str:
    """What a client reads first, of a stream that begins when something is sampled."""
    first = asyncio.ensure_future(anext(texts))
    await sampling
    return await first


async def _joined(texts: Any) -> str:
    return "".join([text async for text in texts])


def test_what_of_a_text_stays():
    assert certain("bad", ()) == "bad"
    assert certain("bad\N{REPLACEMENT CHARACTER}", ()) == "bad"  # the first byte of a character
    assert certain("bad", ("END",)) == "b"  # "ad" may be the beginning of it, as far as its length goes
    assert certain("b", ("END", "!")) == ""
    assert certain("abcd", ("abcdef",)) == ""


def test_an_engine_that_fails_in_the_middle_ends_the_stream_with_an_error():
    engine = Engine()

    async def program(prompt, client):
        texts = chat(client)
        await first_of(texts, engine.sample(2))
        await engine.end(RuntimeError("the engine died"))
        with pytest.raises(openai.APIError, match="the engine died"):
            await anext(texts)
        return 1.0

    with pytest.raises(RuntimeError, match="the engine died"):
        play(program, engine)


def test_an_engine_that_samples_something_else_after_a_restart_ends_the_stream_with_an_error():
    """What no client has read is not recorded, and a retry is sampled anew."""
    engine, errors = Engine(), []

    async def program(prompt, client):
        texts = chat(client)
        await first_of(texts, engine.sample(4, engine.token_ids[::-1]))
        await engine.end()
        with pytest.raises(openai.APIError) as raised:
            await anext(texts)
        errors.append(raised.value.message)
        again = asyncio.ensure_future(_joined(chat(client, extra_headers={"x-stainless-retry-count": "1"})))
        while len(engine.requests) < 2:
            await asyncio.sleep(0.005)
        await engine.end()
        assert await again == ANSWER
        return 1.0

    scored = play(program, engine)
    assert isinstance(scored, ScoredEpisode), scored
    assert errors == ["the answer has become another one than that of which a part was streamed"]
    assert len(engine.requests) == 2
    counted = learned(scored.episode.segments, scored.episode.turn_lengths)
    assert sum(counted.values()) == 1


def test_a_client_that_hangs_up_in_the_middle_ends_its_request():
    engine = Engine()

    async def program(prompt, client):
        headers = {"Authorization": f"Bearer {client.api_key}"}
        body = {"messages": QUESTION, "stream": True}
        sampling = asyncio.ensure_future(engine.sample(2))
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.post(f"{client.base_url}/chat/completions", json=body) as reply,
        ):
            async for line in reply.content:
                if line.startswith(b"data: ") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                    break
        await sampling
        while not engine.aborted:
            await asyncio.sleep(0.005)
        return 1.0

    outcome = play(program, engine)
    assert isinstance(outcome, Failed)
    assert "asked the policy for nothing" in outcome.reason
    assert engine.aborted == [engine.requests[0].id]


def test_a_retry_of_a_stream_in_progress_reads_the_same_answer():
    engine, read = Engine(), []

    async def program(prompt, client):
        async def ask(http: aiohttp.ClientSession, retries: int) -> str:
            headers = {"Authorization": f"Bearer {client.api_key}", "x-stainless-retry-count": str(retries)}
            body = {"messages": QUESTION, "stream": True}
            async with http.post(f"{client.base_url}/chat/completions", json=body, headers=headers) as reply:
                lines = [line async for line in reply.content if line.startswith(b"data: {")]
            choices = [json.loads(line[6:])["choices"][0] for line in lines]
            return "".join(choice["delta"].get("content") or "" for choice in choices)

        async with aiohttp.ClientSession() as http:
            first = asyncio.ensure_future(ask(http, 0))
            await engine.sample(2)
            again = asyncio.ensure_future(ask(http, 1))
            await engine.sample(4)
            await engine.end()
            read.extend(await asyncio.gather(first, again))
            read.append(await ask(http, 2))  # after its end, too
        return 1.0

    scored = play(program, engine)
    assert isinstance(scored, ScoredEpisode), scored
    assert read == [ANSWER] * 3
    assert len(engine.requests) == 1


def test_without_an_engine_that_reports_tokens_a_stream_begins_when_the_answer_is_complete():
    engine = Engine()

    async def program(prompt, client):
        reading = asyncio.ensure_future(_joined(chat(client)))
        await engine.end()
        assert await reading == ANSWER

    agent = PlayFunction(program, ServedPolicy(tokenizer_of("smollm2"), ProgramSettings(), 600))
    with AgentHost(agent, engine, run_seed=5, timeout_s=WAIT_S) as host:
        episode = host.submit(Prompt(3, "bad?", (1,), "7"), KEY, SAMPLING).result(WAIT_S)
    assert isinstance(episode, Episode), episode
