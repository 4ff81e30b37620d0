"""Requests per second of the gateway, and the lag of its event loop, with a stand-in engine.

Many episodes are open at once. Each has a history of thousands of tokens and asks for five streamed turns, over a
connection of its own; the clients are in another process. The engine answers at once, so what is measured is ours:
HTTP, rendering, matching, tokenising new messages, recording. A lag is how much later than asked the loop wakes up. On
a machine with other work that is not ours alone, so the CPU time that the loop's thread took meanwhile is shown too.

    python bench/gateway.py --episodes 2000 --tokens 4000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from concurrent.futures import Future
from typing import Any

import aiohttp
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hotseat.agents import AgentHost, ProgramSettings
from hotseat.agents.black_box import BlackBox
from hotseat.agents.environments.environment_worker import PolicyClient
from hotseat.agents.gateway.program_session import ServedPolicy
from hotseat.types import Completion, Prompt, Request, SampleKey, Sampling, ScoredEpisode

TURNS = 5
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that knows a few words, so that a token has about four characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "w"), ("Ġw", "o"), ("Ġwo", "r"), ("Ġwor", "d")]
    words = {text: at for at, text in enumerate([*alphabet, *(a + b for a, b in merges)])}
    backend = Tokenizer(models.BPE(words, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("<|im_start|>", "<|im_end|>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    return tokenizer


class Remote(BlackBox):
    """Hands each episode to the clients' process, and waits until that says it is over."""

    def __init__(self, tokenizer: Any, to_clients: Any):
        super().__init__(ServedPolicy(tokenizer, ProgramSettings(), 1 << 20))
        self._to_clients = to_clients
        self.waiting: dict[str, asyncio.Future[None]] = {}
        self.loop: asyncio.AbstractEventLoop | None = None
        self.lags: list[float] = []
        self.busy: list[float] = []

    async def play(self, prompt: Prompt, client: PolicyClient) -> float:
        if self.loop is None:
            self.loop = asyncio.get_running_loop()
            self._measuring = self.loop.create_task(self._measure())
        over = self.waiting[client.api_key] = self.loop.create_future()
        self._to_clients.send((client.base_url, client.api_key))
        await over
        return 1.0

    async def _measure(self) -> None:
        while True:
            before, worked = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.005)
            self.lags.append(time.perf_counter() - before - 0.005)
            self.busy.append(time.thread_time() - worked)


def run_clients(requests: Any, num_episodes: int, num_tokens: int) -> None:
    """Play all episodes in this process, and report when each one is over."""

    async def episode(session: aiohttp.ClientSession, url: str, token: str) -> None:
        messages = [{"role": "user", "content": "word" + " word" * (num_tokens - 20)}]
        for _ in range(TURNS):
            body = {"model": "x", "messages": messages, "stream": True}
            headers = {"Authorization": f"Bearer {token}"}
            async with session.post(f"{url}/chat/completions", json=body, headers=headers) as reply:
                assert reply.status == 200, await reply.text()
                lines = (await reply.read()).decode().split("\n\n")
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more words"}]
        requests.send(token)

    async def all_episodes() -> None:
        loop = asyncio.get_running_loop()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            opened = [await loop.run_in_executor(None, requests.recv) for _ in range(num_episodes)]
            requests.send(None)  # the clock starts
            await asyncio.gather(*(episode(session, url, token) for url, token in opened))

    asyncio.run(all_episodes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=4000)
    arguments = parser.parse_args()
    tokenizer = make_tokenizer()
    answer = tuple(tokenizer(" word" * 50 + "<|im_end|>")["input_ids"])

    def engine(request: Request) -> Future[Completion]:
        future: Future[Completion] = Future()
        length = len(answer)
        future.set_result(Completion(request.id, answer, (-1.0,) * length, (0,) * length, "stop"))
        return future

    ours, theirs = multiprocessing.Pipe()
    clients = multiprocessing.get_context("spawn").Process(
        target=run_clients, args=(theirs, arguments.episodes, arguments.tokens)
    )
    clients.start()
    agent = Remote(tokenizer, ours)
    with AgentHost(agent, engine, run_seed=0, max_concurrent=arguments.episodes, timeout_s=600.0) as host:
        samples = [(Prompt(at, "q", (1,)), SampleKey(0, at, 0)) for at in range(arguments.episodes)]
        futures = host.submit_many(samples, Sampling(max_new_tokens=64))
        assert ours.recv() is None
        assert agent.loop is not None
        agent.lags.clear()
        agent.busy.clear()
        began, worked = time.perf_counter(), time.process_time()
        for _ in range(arguments.episodes):
            token = ours.recv()
            agent.loop.call_soon_threadsafe(agent.waiting.pop(token).set_result, None)
        took, worked = time.perf_counter() - began, time.process_time() - worked
        lags, busy = sorted(agent.lags), sorted(agent.busy)
        outcomes = [future.result(60.0) for future in futures]
    clients.join()
    for outcome in outcomes:
        assert isinstance(outcome, ScoredEpisode), outcome
        assert len(outcome.episode.segments) == 1
        assert outcome.episode.num_sampled == TURNS * len(answer)
    print(f"{arguments.episodes} episodes of {TURNS} turns over {arguments.tokens} tokens: {took:.1f} s")
    num_requests = arguments.episodes * TURNS
    print(
        f"{num_requests / took:.0f} requests/s, {worked / num_requests * 1e3:.1f} ms of CPU time each in this process"
    )
    for what, times in (("lag of the event loop", lags), ("CPU time of its thread until it woke up", busy)):
        median, p99, most = (1e3 * at for at in (statistics.median(times), times[int(len(times) * 0.99)], times[-1]))
        print(f"{what}: median {median:.1f} ms, p99 {p99:.1f} ms, most {most:.0f} ms")


if __name__ == "__main__":
    main()
