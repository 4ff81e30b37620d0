"""Requests to engines: few calls, least-loaded, every failure reaches who waits."""

import asyncio

import pytest

from hotseat.errors import DeadlineError, WorkerError
from hotseat.loop.workers.engine_client import EngineClient
from hotseat.types import Completion, Request, Sampling


class FakeEngine:
    """One rank of `FakeEngines`."""

    def __init__(self, engines: "FakeEngines", rank: int):
        self.engines, self.rank = engines, rank

    def within(self, timeout_s):
        return self

    async def acall(self, method, *args):
        return await self.engines.answer(self.rank, method.__name__, *args)


class FakeEngines:
    """Answers a submitted request at the next fetch, unless told otherwise."""

    def __init__(self, size: int):
        self.ranks = range(size)
        self.submitted: dict[int, list[list[str]]] = {rank: [] for rank in self.ranks}
        self.ready: dict[int, list[str]] = {rank: [] for rank in self.ranks}
        self.fail: Exception | None = None
        self.is_silent = False

    def on(self, rank):
        return FakeEngine(self, rank)

    async def answer(self, rank, method, client, *args):
        if self.fail is not None:
            raise self.fail
        if method == "submit":
            self.submitted[rank].append([request.id for request in args[0]])
            self.ready[rank] += [request.id for request in args[0]]
            return [None]
        await asyncio.sleep(0.01)
        if self.is_silent:
            return [[]]
        done, self.ready[rank] = self.ready[rank], []
        return [[Completion(name, (1,), (0.0,), (0,), "stop") for name in done]]


def request(name: str) -> Request:
    return Request(name, (1, 2), Sampling(1), 0)


def test_requests_of_one_turn_travel_together_and_spread_over_engines():
    engines = FakeEngines(2)

    async def main():
        client = EngineClient(engines, timeout_s=5)
        return await asyncio.gather(*(client.generate(request(str(i))) for i in range(6)))

    completions = asyncio.run(main())
    assert [completion.request_id for completion in completions] == list("012345")
    assert engines.submitted == {0: [["0", "2", "4"]], 1: [["1", "3", "5"]]}


def test_a_failing_engine_reaches_everybody_who_waits():
    engines = FakeEngines(1)
    engines.fail = WorkerError("rollout rank 0 died")

    async def main():
        client = EngineClient(engines, timeout_s=5)
        return await asyncio.gather(*(client.generate(request(str(i))) for i in range(3)), return_exceptions=True)

    assert [str(error) for error in asyncio.run(main())] == ["rollout rank 0 died"] * 3


def test_an_engine_that_fails_while_we_wait_is_noticed():
    engines = FakeEngines(1)
    engines.is_silent = True

    async def main():
        client = EngineClient(engines, timeout_s=5)
        waiting = asyncio.create_task(client.generate(request("a")))
        await asyncio.sleep(0.05)
        engines.fail = WorkerError("gone")
        return await waiting

    with pytest.raises(WorkerError, match="gone"):
        asyncio.run(main())


def test_silence_becomes_an_error_that_names_engine_and_request():
    engines = FakeEngines(1)
    engines.is_silent = True

    async def main():
        return await EngineClient(engines, timeout_s=0.1).generate(request("a"))

    with pytest.raises(DeadlineError, match="engine 0: request a had no answer in 0 s"):
        asyncio.run(main())


def test_a_second_batch_of_requests_is_sent_at_once():
    engines = FakeEngines(1)

    async def main():
        client = EngineClient(engines, timeout_s=5)
        first = asyncio.create_task(client.generate(request("a")))
        await asyncio.sleep(0.005)
        second = asyncio.create_task(client.generate(request("b")))
        await asyncio.gather(first, second)

    asyncio.run(main())
    assert engines.submitted == {0: [["a"], ["b"]]}


def test_an_engine_forgets_what_a_lost_client_asked_for(tmp_path):
    """The id is free again, nothing is kept for the one who is gone, and parts can be offloaded."""
    from loop_cases import make_task

    from hotseat.loop.workers.models import EngineSettings, EngineWorker

    make_task(tmp_path)
    engine = EngineWorker(EngineSettings(str(tmp_path / "model"), 16, 1, (1,), "float32", 1))
    try:
        long = [Request(name, (3, 4), Sampling(14, ignore_eos=True), seed) for seed, name in enumerate("abcd")]
        engine.submit("lost", long)
        engine.drop_requests()
        assert engine.fetch("lost", 0.0) == []
        engine.submit("new", long)
        engine.drop_requests()
        engine.offload(["kv_cache"])
    finally:
        engine.close()
