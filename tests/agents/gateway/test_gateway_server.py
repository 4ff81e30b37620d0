"""Programs that reach the policy through the gateway, with the clients that people use."""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
import openai
import pytest
from agent_cases import Clock
from chat_templates import tokenizer_of
from gateway_cases import KEY, SAMPLING, WAIT_S, Engine, Outcome, PlayFunction, learned

from hotseat.agents import AgentHost, Deadlines, OpenRequests, ProgramSettings
from hotseat.agents.conversation import Conversation, ConversationError
from hotseat.agents.gateway.program_session import ServedPolicy
from hotseat.errors import UserError
from hotseat.types import Completion, Episode, Failed, Prompt, SampleKey, ScoredEpisode

pytestmark = pytest.mark.slow
QUESTION = [{"role": "user", "content": "bad?"}]


def play(
    function: Callable[..., Any],
    engine: Engine,
    *,
    name: str = "smollm2",
    max_steps: int | None = None,
    **settings: Any,
) -> Outcome:
    """One episode, as a rollout host runs it."""
    policy = ServedPolicy(tokenizer_of(name), ProgramSettings(**settings), 600, max_steps)
    agent = PlayFunction(closing(function), policy)
    with AgentHost(agent, engine, run_seed=5, timeout_s=WAIT_S, requests=OpenRequests(engine.aborted.extend)) as host:
        return host.submit(Prompt(3, "bad?", (1,), "7"), KEY, SAMPLING).result(WAIT_S)


OPENED: dict[str, openai.AsyncOpenAI] = {}  # by token, to be closed with the episode


def client_of(client: Any) -> openai.AsyncOpenAI:
    if client.api_key not in OPENED:
        OPENED[client.api_key] = openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, max_retries=0)
    return OPENED[client.api_key]


def closing(function: Callable[..., Any]) -> Callable[..., Any]:
    """A program that closes its client, as programs should."""
    if not inspect.iscoroutinefunction(function):
        return function

    async def program(prompt: Any, client: Any) -> Any:
        try:
            return await function(prompt, client)
        finally:
            if client.api_key in OPENED:
                await OPENED.pop(client.api_key).close()

    return program


def post(client: Any, path: str, body: Any, token: str | None = None, **headers: str) -> Any:
    """A request without a client library. Returns its status and its body."""

    async def ask() -> tuple[int, Any]:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        auth = {"Authorization": f"Bearer {client.api_key if token is None else token}"}
        async with aiohttp.request("POST", client.base_url + path, data=raw, headers={**auth, **headers}) as reply:
            text = await reply.text()
            return reply.status, json.loads(text) if text.startswith("{") else text

    return ask()


def refused(*requests: tuple[str, dict], **settings: Any) -> list[str]:
    """The messages of the 400s with which requests are refused; one that is answered follows them."""
    seen: list[str] = []

    async def program(prompt: Any, client: Any) -> float:
        for path, body in requests:
            status, reply = await post(client, path, body)
            assert status == 400, reply
            seen.append(reply["error"]["message"])
        await post(client, "/chat/completions", {"messages": QUESTION})
        return 1.0

    outcome = play(program, Engine(), **settings)
    assert isinstance(outcome, ScoredEpisode), outcome
    return seen


def test_an_openai_client_plays_two_turns_and_the_episode_is_one_segment():
    async def program(prompt, client):
        assert (prompt.text, prompt.label) == ("bad?", "7")
        openai_client, messages = client_of(client), [{"role": "user", "content": prompt.text}]
        for _ in range(2):
            reply = await openai_client.chat.completions.create(model=client.model, messages=messages)
            assert reply.usage.completion_tokens == 3
            messages += [reply.choices[0].message, {"role": "user", "content": "more"}]
        return {"reward": 2, "score": 1, "extra": {"turns": 2}}

    engine = Engine("cab", "dad")
    outcome = play(program, engine)
    assert isinstance(outcome, ScoredEpisode), outcome
    assert (outcome.reward, outcome.score, outcome.extra) == (2.0, 1.0, {"turns": 2.0})
    [segment] = outcome.episode.segments
    assert learned((segment,), outcome.episode.turn_lengths) == engine.sampled
    assert outcome.episode.query.endswith(
        "cab<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\ndad<|im_end|>"
    )
    assert engine.contexts[1].startswith(engine.contexts[0] + "cab<|im_end|>")


def test_answers_stream_with_log_probs_token_ids_and_usage():
    async def program(prompt, client):
        with_stream = {"model": "x", "messages": QUESTION, "stream": True, "stream_options": {"include_usage": True}}
        chunks = [
            chunk async for chunk in await client_of(client).chat.completions.create(**with_stream, logprobs=True)
        ]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "cab"
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        assert chunks[-1].usage.completion_tokens == 3
        [shown] = [c.choices[0].logprobs.content for c in chunks if c.choices and c.choices[0].logprobs]
        assert [(part.token, part.logprob) for part in shown] == [("c", -0.5), ("ab", -0.75), ("<|im_end|>", -1.0)]
        reply = await client_of(client).chat.completions.create(
            model="x", messages=QUESTION, extra_body={"return_token_ids": True}
        )
        assert tuple(reply.choices[0].token_ids) == next(iter(engine.sampled))[1]
        assert tuple(reply.prompt_token_ids) == engine.requests[1].token_ids
        return 0.0

    engine = Engine()
    assert isinstance(play(program, engine), ScoredEpisode)
    assert engine.requests[0].seed != engine.requests[1].seed  # asked twice is sampled twice


def test_several_answers_are_branches_and_are_all_learned():
    async def program(prompt, client):
        reply = await client_of(client).chat.completions.create(model="x", messages=QUESTION, n=3)
        assert [choice.message.content for choice in reply.choices] == ["cab", "dad", "bad"]
        following = [*QUESTION, {"role": "assistant", "content": "dad"}, {"role": "user", "content": "more"}]
        await client_of(client).chat.completions.create(model="x", messages=following)
        return 0.0

    engine = Engine("cab", "dad", "bad", "ace")
    outcome = play(program, engine)
    assert isinstance(outcome, ScoredEpisode), outcome
    assert len(outcome.episode.segments) == 3
    assert learned(outcome.episode.segments, outcome.episode.turn_lengths) == engine.sampled


def test_a_stop_string_ends_the_answer_at_the_token_that_completes_it():
    async def program(prompt, client):
        ask = client_of(client).completions.create
        reply = await ask(model="x", prompt="Q: ", stop=["\nOb"], max_tokens=40)
        assert (reply.choices[0].text, reply.choices[0].finish_reason) == ("add", "stop")
        await ask(model="x", prompt="Q: add\nObs: 7", max_tokens=40)
        return 0.0

    engine = Engine("add\nObs: made up", "bad")
    outcome = play(program, engine)
    assert isinstance(outcome, ScoredEpisode), outcome
    [segment] = outcome.episode.segments
    tokenizer = tokenizer_of("smollm2")
    assert tokenizer.decode(segment.token_ids) == "Q: add\nObs: 7bad<|im_end|>"
    assert tokenizer.decode(segment.token_ids[segment.mask]) == "add\nObbad<|im_end|>"  # not "s: made up"
    assert [request.sampling.stop for request in engine.requests] == [("\nOb",), ()]  # nothing is sampled in vain
    assert len(outcome.episode.facts.turns) == 2  # the time of the answer that was cut is known too


def test_an_answer_cut_at_the_clients_limit_says_so():
    async def program(prompt, client):
        reply = await client_of(client).chat.completions.create(model="x", messages=QUESTION, max_tokens=7)
        assert reply.choices[0].finish_reason == "length"
        return 0.0

    engine = Engine("cab|cut")
    outcome = play(program, engine)
    assert isinstance(outcome, ScoredEpisode), outcome
    assert outcome.episode.is_truncated
    assert engine.requests[0].sampling.max_new_tokens == 7


# --- whose settings hold ----------------------------------------------------------------------------------------------


def test_a_clients_own_temperature_is_overridden_and_that_is_logged_once(caplog):
    async def program(prompt, client):
        for _ in range(2):
            await client_of(client).chat.completions.create(model="x", messages=QUESTION, temperature=0.1, seed=3)
        return 0.0

    engine = Engine()
    outcome = play(program, engine)
    assert isinstance(outcome, ScoredEpisode), outcome
    assert {request.sampling.temperature for request in engine.requests} == {0.7}
    assert learned(outcome.episode.segments, outcome.episode.turn_lengths) == engine.sampled
    assert [record.getMessage() for record in caplog.records] == [
        "a program asked for its own temperature: the run's settings hold (agent.sampling is override), because the"
        " policy is trained under them"
    ]


def test_a_clients_own_settings_can_be_refused():
    body = {"messages": QUESTION, "temperature": 0.1, "presence_penalty": 1}
    assert refused(("/chat/completions", body), sampling="refuse") == [
        "presence_penalty, temperature: the run's own settings hold (agent.sampling is refuse), because the policy is"
        " trained under them: leave these out"
    ]


def test_answers_sampled_by_a_clients_own_settings_are_context_and_not_learned():
    async def program(prompt, client):
        ask = client_of(client).chat.completions.create
        reply = await ask(model="x", messages=QUESTION, temperature=0.1)
        following = [*QUESTION, reply.choices[0].message, {"role": "user", "content": "more"}]
        await ask(model="x", messages=following, temperature=0.7)
        return 0.0

    engine = Engine("cab", "dad")
    outcome = play(program, engine, sampling="untrained")
    assert isinstance(outcome, ScoredEpisode), outcome
    assert [request.sampling.temperature for request in engine.requests] == [0.1, 0.7]
    [segment] = outcome.episode.segments
    assert tokenizer_of("smollm2").decode(segment.token_ids[segment.mask]) == "dad<|im_end|>"
    own = ({"logit_bias": {"1": 5}}, {"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0})
    bodies = [("/chat/completions", {"messages": QUESTION, **settings}) for settings in own]
    assert refused(*bodies, sampling="untrained") == [
        "logit_bias: the engine cannot sample that way (agent.sampling is untrained)",
        *["temperature must be from 0 to 100, and top_p above 0 and at most 1"] * 3,
    ]


# --- what is refused --------------------------------------------------------------------------------------------------


def num_tokens(question: str) -> int:
    text = tokenizer_of("smollm2").apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    return len(tokenizer_of("smollm2")(text)["input_ids"])


REFUSED_CHATS = [
    ({"audio": {}}, "audio: not supported by this gateway"),
    ({"n": 0}, "n: 0 is not a whole number from 1 to 128"),
    ({"stop": [""]}, "stop: not a string, nor a list of at most 16 strings"),
    ({"temperature": "hot"}, "temperature: 'hot' is not a number"),
    ({"stream": 1}, "stream: 1 is neither true nor false"),
    ({"top_logprobs": 2}, "top_logprobs: the engine reports log-probs of sampled tokens only"),
    ({"logprobs": 5}, "logprobs: 5 is neither true nor false"),
    ({"stream_options": 5}, "stream_options: not an object"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "the text is not Unicode: surrogates not allowed"),
    ({"modalities": ["audio"]}, "modalities: only text is possible here"),
    ({"chat_template_kwargs": 1}, "chat_template_kwargs: not an object"),
    ({"messages": []}, "messages: not a list with at least one message"),
    ({"messages": [{"content": "x"}]}, "messages[0]: not an object with a role"),
    ({"messages": [{"role": "user"}]}, "messages[0]: neither content nor tool calls"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [1]}]},
        "messages[0].tool_calls: not a list of calls of functions",
    ),
    (
        {"messages": [{"role": "user", "content": 5}]},
        "a message has content that is a int, not a string or a list of parts",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "a message has content of type image_url: only text is possible here",
    ),
    (
        {"messages": [{"role": "user", "content": "bad " * 400}]},
        f"the context has {num_tokens('bad ' * 400)} tokens; it must have at least one and leave at least one of 600"
        " (data.max_length) for the answer",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "add"}}]},
        "tools: this model's answers cannot be parsed for tool calls: its tokenizer has no response_template, and"
        " agent.tool_parser is not set",
    ),
    (
        {"tools": [{"type": "web_search"}]},
        "tools: not a list of functions with names; other kinds of tools are not supported",
    ),
]
REFUSED_TEXTS = [
    ({"prompt": [10**9]}, f"prompt: token 1000000000 is not one of the model's {len(tokenizer_of('smollm2'))}"),
    ({"prompt": [{}]}, "prompt: neither a text, nor token ids, nor a list of either"),
    ({"prompt": "a", "echo": True}, "echo: not supported by this gateway"),
    ({"prompt": "a", "best_of": 2}, "best_of: only the value of n is possible, because every answer is learned from"),
    (
        {"prompt": "a", "logprobs": 2},
        "logprobs: only 0 is possible: the engine reports log-probs of sampled tokens only",
    ),
]


def test_a_request_that_cannot_be_answered_is_refused_with_the_reason():
    chats = [("/chat/completions", {"messages": QUESTION, **body}) for body, _ in REFUSED_CHATS]
    texts = [("/completions", body) for body, _ in REFUSED_TEXTS]
    assert refused(*chats, *texts) == [message for _, message in REFUSED_CHATS + REFUSED_TEXTS]


def test_wrong_tokens_bodies_and_paths_are_refused_and_do_no_harm():
    async def program(prompt, client):
        assert (await post(client, "/chat/completions", {"messages": QUESTION}, token="guessed"))[0] == 401
        status, reply = await post(client, "/chat/completions", b"{")
        assert (status, reply["error"]["message"].startswith("the body is not JSON: ")) == (400, True)
        assert (await post(client, "/chat/completions", [1]))[1]["error"]["message"] == "the body is not a JSON object"
        assert (await post(client, "/chat/completions", b" " * (40 << 20)))[0] == 413
        status, reply = await post(client, "/embeddings", {})
        assert (status, reply["error"]["message"].startswith("/v1/embeddings: not served; ")) == (404, True)
        models = await client_of(client).models.list()
        assert [model.id for model in models.data] == ["policy"]
        await post(client, "/chat/completions", {"messages": QUESTION})
        return 0.0

    engine = Engine()
    assert isinstance(play(program, engine), ScoredEpisode)
    assert len(engine.requests) == 1


def test_the_token_of_another_episode_or_one_that_is_over_opens_nothing():
    left = []

    async def program(prompt, client):
        for before in left:
            assert (await post(client, "/chat/completions", {"messages": QUESTION}, token=before))[0] == 401
        left.append(client.api_key)
        await post(client, "/chat/completions", {"messages": QUESTION})
        return 0.0

    agent = PlayFunction(program, ServedPolicy(tokenizer_of("smollm2"), ProgramSettings(), 600))
    with AgentHost(agent, Engine(), run_seed=5, timeout_s=WAIT_S) as host:
        for sample in range(2):
            outcome = host.submit(Prompt(3, "q", (1,)), SampleKey(0, 3, sample), SAMPLING).result(WAIT_S)
            assert isinstance(outcome, ScoredEpisode), outcome
    assert len(set(left)) == 2


def test_after_agent_max_steps_answers_the_next_request_is_refused():
    async def program(prompt, client):
        statuses = [(await post(client, "/chat/completions", {"messages": QUESTION}))[0] for _ in range(3)]
        assert statuses == [200, 200, 400]
        return 0.0

    assert isinstance(play(program, Engine(), max_steps=2), ScoredEpisode)


# --- retries, clients that hang up, engines that fail -----------------------------------------------------------------


def test_a_request_that_is_sent_again_gets_the_first_answer():
    body = {"messages": QUESTION}

    async def program(prompt, client):
        first = await post(client, "/chat/completions", body)
        assert await post(client, "/chat/completions", body, **{"x-stainless-retry-count": "1"}) == first
        assert await post(client, "/chat/completions", body) != first
        keyed = await post(client, "/chat/completions", body, **{"Idempotency-Key": "a"})
        assert await post(client, "/chat/completions", body, **{"Idempotency-Key": "a"}) == keyed
        assert (await post(client, "/chat/completions", {**body, "n": 2}, **{"Idempotency-Key": "a"}))[0] == 422
        return 0.0

    engine = Engine()
    assert isinstance(play(program, engine), ScoredEpisode)
    assert len(engine.requests) == 3


def test_a_client_that_hangs_up_ends_its_request_and_may_ask_again_for_the_same():
    async def program(prompt, client):
        engine.is_holding = True
        asking = asyncio.ensure_future(client_of(client).chat.completions.create(model="x", messages=QUESTION))
        while not engine.requests:
            await asyncio.sleep(0.01)
        asking.cancel()
        while not engine.held[0].cancelled():
            await asyncio.sleep(0.01)
        engine.is_holding = False
        again = {"x-stainless-retry-count": "1"}
        while (await post(client, "/chat/completions", {"messages": QUESTION, "model": "x"}, **again))[0] != 200:
            await asyncio.sleep(0.01)
        return 0.0

    engine = Engine()
    outcome = play(program, engine)
    assert isinstance(outcome, ScoredEpisode), outcome
    assert engine.requests[0].seed == engine.requests[-1].seed
    assert len(learned(outcome.episode.segments, outcome.episode.turn_lengths)) == 1


def test_of_equal_requests_at_once_a_retry_gets_the_answer_of_the_one_that_was_given_up():
    async def program(prompt, client):
        engine.is_holding = True
        body = {"messages": QUESTION}
        gives_up, stays = (asyncio.ensure_future(post(client, "/chat/completions", body)) for _ in range(2))
        while len(engine.requests) < 2:
            await asyncio.sleep(0.01)
        gives_up.cancel()
        while not any(held.cancelled() for held in engine.held):
            await asyncio.sleep(0.01)
        engine.is_holding = False
        retried = asyncio.ensure_future(post(client, "/chat/completions", body, **{"x-stainless-retry-count": "1"}))
        await asyncio.wait([retried], timeout=60)  # it does not wait for the other one, which has no answer yet
        [waiting] = [held for held in engine.held if not held.cancelled()]
        ids = tuple(tokenizer_of("smollm2")("other<|im_end|>", add_special_tokens=False)["input_ids"])
        waiting.set_result(Completion("x", ids, (-1.0,) * len(ids), (0,) * len(ids), "stop"))
        answers = [reply["choices"][0]["message"]["content"] for _, reply in (await retried, await stays)]
        again = await post(client, "/chat/completions", body, **{"x-stainless-retry-count": "2"})
        assert again[1]["choices"][0]["message"]["content"] in answers
        return {"reward": 0.0, "extra": {"differ": answers == ["cab", "other"]}}

    engine = Engine()
    outcome = play(program, engine)
    assert isinstance(outcome, ScoredEpisode), outcome
    assert outcome.extra == {"differ": 1.0}
    given_up = next(request for request, held in zip(engine.requests, engine.held, strict=False) if held.cancelled())
    assert engine.requests[2].seed == given_up.seed


def test_an_engine_that_fails_ends_the_episode_whatever_the_program_does():
    async def program(prompt, client):
        with pytest.raises(openai.InternalServerError, match="the engine died"):
            await client_of(client).chat.completions.create(model="x", messages=QUESTION)
        return 1.0

    with pytest.raises(RuntimeError, match="the engine died"):
        play(program, Engine("dies"))


def test_a_program_that_asks_for_nothing_is_a_failed_sample():
    outcome = play(lambda prompt, client: 1.0, Engine())
    assert isinstance(outcome, Failed)
    assert outcome.reason.endswith("the program asked the policy for nothing, so there is nothing to learn from")


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ({"rewards": 1}, "the result has rewards; it may have reward, score, extra, turn_rewards"),
        ({"turn_rewards": [1, 2]}, "turn_rewards of the result is 2 numbers, not one for each of the 1 answers"),
        ({"turn_rewards": 1}, "turn_rewards of the result is a int, not one for each of the 1 answers"),
        ({"turn_rewards": [1], "reward": 2}, "sum up to 1, but its reward is 2: leave one out"),
        ({"extra": {"a": 1}}, "the result has extra without a reward; the run's own reward has its own"),
        ("good", "the reward of the result is a str, not one number"),
        ({"reward": float("nan")}, "the reward of the result is nan"),
        ({"reward": 1, "extra": 3}, "extra of the result is a int, not numbers by name"),
    ],
)
def test_a_result_that_is_no_reward_fails_the_sample(result, reason):
    async def program(prompt, client):
        await post(client, "/chat/completions", {"messages": QUESTION})
        return result

    outcome = play(program, Engine())
    assert isinstance(outcome, Failed)
    assert outcome.reason.endswith(reason)


def test_a_program_may_reward_each_of_its_turns_and_they_follow_their_tokens():
    async def program(prompt, client):
        _, first = await post(client, "/chat/completions", {"messages": QUESTION})
        answer = first["choices"][0]["message"]
        await post(client, "/chat/completions", {"messages": [{"role": "user", "content": "else, at some length?"}]})
        await post(client, "/chat/completions", {"messages": [*QUESTION, answer, *QUESTION]})
        return {"turn_rewards": [1, 2, 4]}

    scored = play(program, Engine("a", "bb", "ccc"))
    assert isinstance(scored, ScoredEpisode)
    assert scored.reward == scored.score == 7.0
    # The first segment is that of the second answer, because the conversation of the first ends last.
    assert scored.turn_rewards == (2.0, 1.0, 4.0)
    turns = scored.episode.facts.turns
    assert len(turns) == 3
    assert turns[1].answered_s <= turns[0].asked_s <= turns[0].answered_s <= turns[2].asked_s


def test_a_program_whose_policy_runs_out_of_time_is_told_so_and_what_was_sampled_is_scored():
    refused = []

    async def program(prompt, client):
        for text in ("one", "two", "three"):
            refused.append(await post(client, "/chat/completions", {"messages": [{"role": "user", "content": text}]}))
        raise RuntimeError("it cannot go on without the policy")

    engine = Engine("a")
    agent = PlayFunction(program, ServedPolicy(tokenizer_of("smollm2"), ProgramSettings(), 600))

    def abort(names):  # the second request had sampled two tokens
        request = engine.requests[1]
        engine.held[0].set_result(Completion(request.id, (5, 6), (-1.0, -1.0), (0, 0), "abort"))

    def ask(request):
        engine.is_holding = bool(engine.requests)
        if engine.is_holding:
            clock.pass_by(20.0)
        return engine(request)

    limits = Deadlines(scores_policy=True)
    with AgentHost(agent, ask, run_seed=5, timeout_s=20.0, requests=OpenRequests(abort), deadlines=limits) as host:
        clock = Clock(host._loop)
        episode = host.submit(Prompt(3, "bad?", (1,), "7"), KEY, SAMPLING).result(WAIT_S)
    assert isinstance(episode, Episode), episode
    assert episode.is_truncated
    assert sorted(episode.turn_lengths) == [2, 2]
    assert refused[1][1]["choices"][0]["finish_reason"] == "length"
    assert refused[2][1]["error"]["code"] == "timeout"


def test_a_program_that_samples_only_by_its_own_settings_is_a_failed_sample():
    async def program(prompt, client):
        await post(client, "/chat/completions", {"messages": QUESTION, "temperature": 0.1})
        return 1.0

    outcome = play(program, Engine(), sampling="untrained")
    assert isinstance(outcome, Failed)
    why = "sampled only by settings of its own or with learn: false, so there is nothing to learn from"
    assert outcome.reason.endswith(why)


def test_an_answer_that_is_asked_for_without_learning_is_context_only():
    async def program(prompt, client):
        asides = [
            ("/chat/completions", {"messages": QUESTION, "learn": False}),
            ("/completions", {"prompt": "bad?", "learn": False}),
            ("/responses", {"input": "bad?", "learn": False}),
            ("/messages", {"messages": QUESTION, "max_tokens": 9, "learn": False}),
        ]
        await post(client, "/chat/completions", {"messages": QUESTION, "learn": True})
        assert [(await post(client, path, body))[0] for path, body in asides] == [200] * 4
        status, reply = await post(client, "/chat/completions", {"messages": QUESTION, "learn": "no"})
        assert (status, reply["error"]["message"]) == (400, "learn: 'no' is neither true nor false")
        return 1.0

    engine = Engine("cab", "dad|cut")
    scored = play(program, engine)
    assert isinstance(scored, ScoredEpisode), scored
    [first] = [sampled for sampled in engine.sampled if sampled[3][0] == 1]
    assert set(learned(scored.episode.segments, scored.episode.turn_lengths)) == {first}
    assert not scored.episode.is_truncated  # that of an opponent was


def test_messages_that_the_template_refuses_and_a_model_without_one_are_named():
    refusing = "{{ raise_exception('users are not allowed') if messages[0].content == 'bad?' else 'ace' }}"
    seen = []

    async def program(prompt, client):
        for content in ("bad?", "good?"):
            body = {"messages": [{"role": "user", "content": content}]}
            seen.append(await post(client, "/chat/completions", body))
        return 0.0

    assert isinstance(play(program, Engine(), chat_template=refusing), ScoredEpisode)
    [(status, reply), (fine, _)] = seen
    assert (status, fine) == (400, 200)
    assert reply["error"]["message"] == "the chat template refuses these messages: users are not allowed"
    tokenizer = tokenizer_of("smollm2")
    with pytest.raises(ConversationError, match="tokenizer has no chat template: set data.chat_template"):
        Conversation(SimpleNamespace(chat_template=None, decode=tokenizer.decode)).of_messages(QUESTION)


def test_too_many_requests_at_once_are_told_to_wait(monkeypatch):
    monkeypatch.setattr("hotseat.agents.gateway.gateway_server._MAX_OPEN", 2)

    async def program(prompt, client):
        replies = await asyncio.gather(*(post(client, "/chat/completions", {"messages": QUESTION}) for _ in range(40)))
        refused = [reply["error"]["message"] for status, reply in replies if status == 429]
        assert set(refused) <= {"the episode has 2 open requests"}
        assert len(refused) + sum(status == 200 for status, _ in replies) == 40
        return float(len(refused))

    outcome = play(program, Engine())
    assert isinstance(outcome, ScoredEpisode), outcome
    assert outcome.reward > 0


def test_an_episode_has_so_many_bytes_of_open_requests_at_most(monkeypatch):
    monkeypatch.setattr("hotseat.agents.gateway.gateway_server._MAX_OPEN_BYTES", 2 << 20)

    async def program(prompt, client):
        status, reply = await post(client, "/chat/completions", b" " * (3 << 20))
        assert (status, reply["error"]["message"]) == (429, "the episode has 2 MiB of open requests")
        assert (await post(client, "/chat/completions", {"messages": QUESTION}))[0] == 200
        return 1.0

    assert play(program, Engine()).reward == 1.0


def test_a_plain_function_may_block_and_leave_the_reward_to_the_run():
    def program(prompt, client):
        blocking = openai.OpenAI(base_url=client.base_url, api_key=client.api_key)
        assert blocking.chat.completions.create(model="x", messages=QUESTION).choices[0].message.content == "cab"

    outcome = play(program, Engine())
    assert isinstance(outcome, Episode), outcome


def test_programs_elsewhere_get_the_address_that_is_advertised():
    async def program(prompt, client):
        assert (client.base_url, client.root_url) == ("http://gateway.example:8000/v1", "http://gateway.example:8000")
        return 1.0

    outcome = play(program, Engine(), bind="127.0.0.1", advertise_url="http://gateway.example:8000/")
    assert "asked the policy for nothing" in outcome.reason


def test_an_address_that_cannot_be_bound_ends_the_run():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        with pytest.raises(UserError, match=f"agent.gateway.bind: cannot listen at 127.0.0.1:{port}: "):
            play(lambda prompt, client: 1.0, Engine(), bind=f"127.0.0.1:{port}")


# --- tools, and the other protocols -----------------------------------------------------------------------------------

TOOL = {
    "name": "add",
    "description": "adds",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CALL = (
    '<think>bad</think>\n\nace<tool_call>{"name":"add","arguments":{"a":  1}}</tool_call>'  # as no template writes it
)


@pytest.fixture(scope="module", autouse=True)
def _parses_tool_calls():
    from trl.chat_template_utils import qwen3_template

    tokenizer_of("qwen3").response_template = qwen3_template


def check_two_turns_with_a_tool(program: Callable[..., Any]) -> None:
    engine = Engine(CALL, "dad", name="qwen3")
    outcome = play(program, engine, name="qwen3")
    assert isinstance(outcome, ScoredEpisode), outcome
    [segment] = outcome.episode.segments
    assert learned((segment,), outcome.episode.turn_lengths) == engine.sampled
    assert '{"name": "add"' in engine.contexts[0]
    assert engine.contexts[1].startswith(engine.contexts[0] + CALL)
    assert "<tool_response>\n2\n</tool_response>" in engine.contexts[1]


def test_variables_of_the_template_are_the_runs_unless_a_request_has_its_own():
    async def program(prompt, client):
        for own in ({}, {"chat_template_kwargs": {"enable_thinking": True}}):
            await post(client, "/chat/completions", {"messages": QUESTION, **own})
        return 1.0

    engine = Engine("ace", name="qwen3")
    outcome = play(program, engine, name="qwen3", chat_template_kwargs={"enable_thinking": False})
    assert isinstance(outcome, ScoredEpisode), outcome
    assert [context.endswith("<think>\n\n</think>\n\n") for context in engine.contexts] == [True, False]


def test_tool_calls_are_parsed_and_their_tokens_stay_as_sampled():
    async def program(prompt, client):
        ask, tools = client_of(client).chat.completions.create, [{"type": "function", "function": TOOL}]
        reply = await ask(model="x", messages=QUESTION, tools=tools)
        message = reply.choices[0].message
        assert (reply.choices[0].finish_reason, message.content, message.reasoning_content) == (
            "tool_calls",
            "ace",
            "bad",
        )
        [call] = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
        result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
        reply = await ask(model="x", messages=[*QUESTION, message, result], tools=tools, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in reply]) == "dad"
        return 0.0

    check_two_turns_with_a_tool(program)


HARMONY_CALL = (
    "<|channel|>analysis<|message|>bad<|end|><|start|>assistant<|channel|>commentary to=functions.add"
    ' <|constrain|>json<|message|>{"a":  1}<|call|>'
)
HARMONY_END = "<|channel|>analysis<|message|>cab<|end|><|start|>assistant<|channel|>final<|message|>dad<|return|>"


@pytest.mark.parametrize("streams", [False, True])
def test_gpt_oss_calls_on_a_channel_and_thinks_on_another(streams):
    """And goes on after an answer without a second end of it."""

    async def program(prompt, client):
        ask, tools = client_of(client).chat.completions.create, [{"type": "function", "function": TOOL}]
        reply = await ask(model="x", messages=QUESTION, tools=tools)
        message = reply.choices[0].message
        assert (reply.choices[0].finish_reason, message.content, message.reasoning_content) == (
            "tool_calls",
            None,
            "bad",
        )
        [call] = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
        given = {"role": "assistant", "tool_calls": [call.model_dump()]}
        messages = [*QUESTION, given, {"role": "tool", "tool_call_id": call.id, "content": "2"}]
        for _ in range(2):
            reply = await ask(model="x", messages=messages, tools=tools, stream=streams)
            if streams:
                said = "".join([chunk.choices[0].delta.content or "" async for chunk in reply])
            else:
                said = reply.choices[0].message.content
            assert said == "dad"
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "ace"}]
        return 0.0

    engine = Engine(HARMONY_CALL, HARMONY_END, name="gptoss")
    outcome = play(program, engine, name="gptoss")
    assert isinstance(outcome, ScoredEpisode), outcome
    [segment] = outcome.episode.segments
    assert learned((segment,), outcome.episode.turn_lengths) == engine.sampled
    result = '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"2"<|end|><|start|>assistant'
    assert engine.contexts[1] == engine.contexts[0] + HARMONY_CALL + result
    more = "<|start|>user<|message|>ace<|end|><|start|>assistant"
    assert engine.contexts[2] == engine.contexts[1] + HARMONY_END + more


def test_gpt_oss_without_tools_shows_its_final_channel_alone():
    async def program(prompt, client):
        reply = await client_of(client).chat.completions.create(model="x", messages=QUESTION)
        assert reply.choices[0].message.content == "dad"
        assert reply.choices[0].message.reasoning_content == "cab"
        return 0.0

    assert isinstance(play(program, Engine(HARMONY_END, name="gptoss"), name="gptoss"), ScoredEpisode)


def test_tool_calls_stream_as_their_clients_put_them_together():
    async def program(prompt, client):
        tools = [{"type": "function", "function": TOOL}]
        async with client_of(client).chat.completions.stream(model="x", messages=QUESTION, tools=tools) as stream:
            [choice] = (await stream.get_final_completion()).choices
        [call] = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content, call.function.name) == ("tool_calls", "ace", "add")
        assert json.loads(call.function.arguments) == {"a": 1}
        flat = [{"type": "function", **TOOL}]
        async with client_of(client).responses.stream(model="x", input="bad?", tools=flat) as stream:
            reply = await stream.get_final_response()
        assert (reply.output_text, reply.output[1].name, reply.output[1].arguments) == ("ace", "add", '{"a": 1}')
        return 0.0

    outcome = play(program, Engine(CALL, name="qwen3"), name="qwen3")
    assert isinstance(outcome, ScoredEpisode), outcome


def test_tool_calls_are_parsed_by_the_family_that_is_named():
    pytest.importorskip("renderers")

    async def program(prompt, client):
        ask, tools = client_of(client).chat.completions.create, [{"type": "function", "function": TOOL}]
        reply = await ask(model="x", messages=QUESTION, tools=tools)
        [call] = reply.choices[0].message.tool_calls
        assert (reply.choices[0].message.content, call.function.name, call.function.arguments) == (
            "ace",
            "add",
            '{"a": 1}',
        )
        broken = await ask(model="x", messages=QUESTION, tools=tools)
        assert "<tool_call>" not in broken.choices[0].message.content  # a special token here, so it is not shown
        assert broken.choices[0].message.tool_calls is None
        return 0.0

    engine = Engine(CALL, CALL.replace("}}", "}"), name="qwen3")
    outcome = play(program, engine, name="qwen3", tool_parser="qwen3")
    assert isinstance(outcome, ScoredEpisode), outcome
    with pytest.raises(UserError, match="agent.tool_parser llama-3: .*; the package renderers knows deepseek-r1"):
        play(program, engine, name="qwen3", tool_parser="llama-3")


def test_a_family_without_the_package_that_knows_it_is_refused(monkeypatch):
    monkeypatch.setattr("hotseat.agents.gateway.parsing.find_spec", lambda name: None)
    with pytest.raises(UserError, match="agent.tool_parser qwen3: the package renderers is not installed"):
        play(lambda prompt, client: 1.0, Engine(), tool_parser="qwen3")


def test_the_responses_protocol_with_a_tool_whole_and_streamed():
    async def program(prompt, client):
        ask, asked = client_of(client).responses.create, [{"role": "user", "content": "bad?"}]
        reply = await ask(model="x", instructions="ace", input=asked, tools=[{"type": "function", **TOOL}])
        _, call = reply.output
        assert (reply.output_text, call.name, json.loads(call.arguments)) == ("ace", "add", {"a": 1})
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
        items = [*asked, *(item.model_dump(exclude_none=True) for item in reply.output), result]
        stream = await ask(
            model="x", instructions="ace", input=items, tools=[{"type": "function", **TOOL}], stream=True
        )
        events = [event async for event in stream]
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "dad"
        assert events[-1].type == "response.completed"
        assert events[-1].response.output_text == "dad"
        return 0.0

    check_two_turns_with_a_tool(program)


@pytest.mark.long
def test_anthropics_protocol_with_a_tool_whole_and_streamed():
    anthropic = pytest.importorskip("anthropic")
    tool = {"name": "add", "description": "adds", "input_schema": TOOL["parameters"]}

    async def program(prompt, client):
        async with anthropic.AsyncAnthropic(base_url=client.root_url, api_key=client.api_key) as theirs:
            fixed = {"model": "x", "max_tokens": 40, "system": "ace", "tools": [tool]}
            reply = await theirs.messages.create(messages=QUESTION, **fixed)
            assert reply.stop_reason == "tool_use"
            text, use = reply.content
            assert (text.text, use.name, use.input) == ("ace", "add", {"a": 1})
            result = {"type": "tool_result", "tool_use_id": use.id, "content": "2"}
            said = [*QUESTION, {"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
            async with theirs.messages.stream(messages=said, **fixed) as stream:
                assert "".join([piece async for piece in stream.text_stream]) == "dad"
                assert (await stream.get_final_message()).usage.output_tokens > 0
            with pytest.raises(
                anthropic.BadRequestError, match="an answer that is begun by the client is not supported"
            ):
                await theirs.messages.create(messages=[*QUESTION, {"role": "assistant", "content": "A"}], **fixed)
            counted = await theirs.messages.count_tokens(messages=QUESTION, model="x", system="ace", tools=[tool])
            assert counted.input_tokens == reply.usage.input_tokens
            with pytest.raises(anthropic.AuthenticationError):
                await theirs.with_options(api_key="guessed").messages.create(messages=QUESTION, **fixed)
        return 0.0

    check_two_turns_with_a_tool(program)


def test_tokens_of_a_request_are_counted_without_sampling():
    async def program(prompt, client):
        headers = {"x-api-key": client.api_key}
        async with aiohttp.ClientSession(client.root_url, headers=headers) as session:
            body = {"model": "x", "messages": QUESTION}
            async with session.post("/v1/messages/count_tokens", json=body) as counted:
                assert counted.status == 200, await counted.text()
                num_tokens = (await counted.json())["input_tokens"]
            async with session.post("/v1/messages/count_tokens", json={"messages": []}) as refusal:
                assert refusal.status == 400
                assert (await refusal.json())["type"] == "error"
            assert not engine.requests
            async with session.post("/v1/messages", json={**body, "max_tokens": 5}) as reply:
                assert (await reply.json())["usage"]["input_tokens"] == num_tokens == len(engine.requests[0].token_ids)
        return 1.0

    engine = Engine("ace")
    assert isinstance(play(program, engine), ScoredEpisode)


def test_what_the_other_protocols_cannot_is_refused_with_the_reason():
    question = {"messages": QUESTION, "max_tokens": 5}
    assert refused(
        ("/responses", {"input": 5}),
        ("/responses", {"input": [{"type": "web_search_call"}]}),
        ("/responses", {"input": "q", "background": True}),
        ("/responses", {"input": "q", "previous_response_id": "resp_1"}),
        ("/messages", {"messages": QUESTION}),
        ("/messages", {**question, "tools": [{"type": "bash_20250124", "name": "bash"}]}),
        ("/messages", {**question, "messages": []}),
    ) == [
        "input: neither a text nor a list of items",
        "input[0]: items of type web_search_call are not supported by this gateway",
        "background: only False is possible here",
        "previous_response_id: not supported by this gateway",
        "max_tokens: not set",
        "tools: only tools of your own are possible, with name and input_schema",
        "messages: not a list with at least one message",
    ]
