"""Requests to engines: few calls, least-loaded, every failure reaches who waits."""

import asyncio
import threading
import time
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest

from hotseat.errors import DeadlineError, NonFiniteError, WorkerError
from hotseat.loop.workers.engine_client import EngineClient, FailedRequest, SampledTokens, engines_of_host
from hotseat.model_source import ModelSource
from hotseat.types import Completion, Request, Sampling


class FakeEngine:
    """One rank of `FakeEngines`."""

    def __init__(self, engines: "FakeEngines", rank: int):
        self.engines, self.rank = engines, rank

    def within(self, timeout_s):
        return self

    async def acall(self, method, *args):
        return await self.engines.answer(self.rank, method.__name__, *args)

    def start(self, method, names):
        assert method.__name__ == "abort"
        self.engines.aborted.append((self.rank, names))


class FakeEngines:
    """Answers a submitted request at the next fetch, unless told otherwise."""

    def __init__(self, size: int):
        self.ranks = range(size)
        self.submitted: dict[int, list[list[str]]] = {rank: [] for rank in self.ranks}
        self.ready: dict[int, list[str]] = {rank: [] for rank in self.ranks}
        self.aborted: list[tuple[int, list[str]]] = []
        self.fail: Exception | None = None
        self.is_silent = False
        self.dead: set[int] = set()
        self.failing: set[str] = set()  # requests

    def on(self, rank):
        return FakeEngine(self, rank)

    async def answer(self, rank, method, client, *args):
        if self.fail is not None:
            raise self.fail
        if rank in self.dead:
            raise death(rank)
        if method == "submit":
            self.submitted[rank].append([request.id for request in args[0]])
            self.ready[rank] += [request.id for request in args[0]]
            return [None]
        await asyncio.sleep(0.01)
        if rank in self.dead:
            raise death(rank)
        if self.is_silent:
            return [[]]
        done, self.ready[rank] = self.ready[rank], []
        return [[self.outcome(name) for name in done]]

    def outcome(self, name: str) -> Completion | FailedRequest:
        if name in self.failing:
            return FailedRequest(name, NonFiniteError(f"request {name} is not finite"))
        return Completion(name, (1,), (0.0,), (0,), "stop")

    def replace(self, rank: int) -> "FakeEngines":
        """Give a rank a new process, which knows of no request."""
        self.dead.discard(rank)
        self.ready[rank] = []
        return self


def death(rank: int) -> WorkerError:
    error = WorkerError(f"rollout rank {rank} died")
    error.is_death = True
    return error


async def until(condition) -> None:
    """Wait until something has happened in the event loop."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def request(name: str) -> Request:
    return Request(name, (1, 2), Sampling(1), 0)


def test_requests_of_one_turn_travel_together_and_spread_over_engines():
    engines = FakeEngines(2)

    async def main():
        client = EngineClient(engines, "host-0", timeout_s=5)
        return await asyncio.gather(*(client.generate(request(str(i))) for i in range(6)))

    completions = asyncio.run(main())
    assert [completion.request_id for completion in completions] == list("012345")
    assert engines.submitted == {0: [["0", "2", "4"]], 1: [["1", "3", "5"]]}


def test_preferred_engines_get_the_requests_as_long_as_one_is_alive():
    engines = FakeEngines(4)

    async def main():
        client = EngineClient(engines, "host-1", timeout_s=5, preferred=engines_of_host(1, 2, 4))
        await asyncio.gather(*(client.generate(request(str(i))) for i in range(4)))
        engines.dead = {2, 3}
        return await asyncio.gather(*(client.generate(request(f"later {i}")) for i in range(2)))

    completions = asyncio.run(main())
    assert [engines.submitted[rank][0] for rank in (2, 3)] == [["0", "2"], ["1", "3"]]
    assert {completion.request_id for completion in completions} == {"later 0", "later 1"}
    assert sorted(name for rank in (0, 1) for names in engines.submitted[rank] for name in names) == [
        "later 0",
        "later 1",
    ]


def test_hosts_and_engines_prefer_each_other_evenly():
    assert [list(engines_of_host(host, 2, 4)) for host in range(2)] == [[0, 1], [2, 3]]
    assert [list(engines_of_host(host, 4, 2)) for host in range(4)] == [[0], [1], [0], [1]]
    assert [list(engines_of_host(host, 3, 2)) for host in range(3)] == [[], [], []]  # all engines


def test_a_failing_engine_reaches_everybody_who_waits():
    engines = FakeEngines(1)
    engines.fail = WorkerError("rollout rank 0 died")

    async def main():
        client = EngineClient(engines, "host-0", timeout_s=5)
        return await asyncio.gather(*(client.generate(request(str(i))) for i in range(3)), return_exceptions=True)

    assert [str(error) for error in asyncio.run(main())] == ["rollout rank 0 died"] * 3


def test_an_engine_that_fails_while_we_wait_is_noticed():
    engines = FakeEngines(1)
    engines.is_silent = True

    async def main():
        client = EngineClient(engines, "host-0", timeout_s=5)
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
        return await EngineClient(engines, "host-0", timeout_s=0.1).generate(request("a"))

    with pytest.raises(DeadlineError, match="engine 0: request a had no answer in 0 s"):
        asyncio.run(main())


def test_what_was_sampled_of_a_request_that_is_ended_at_its_deadline_has_time_to_come(monkeypatch):
    engines = FakeEngines(1)
    engines.is_silent = True
    now_s = 0.0
    monkeypatch.setattr("hotseat.loop.workers.engine_client.time", SimpleNamespace(monotonic=lambda: now_s))

    async def main():
        nonlocal now_s
        client = EngineClient(engines, "host-0", timeout_s=10)
        ended, other = (asyncio.create_task(client.generate(request(name))) for name in "ab")
        while not engines.ready[0]:
            await asyncio.sleep(0.001)
        now_s = 9.0
        client.abort(["a"])
        now_s = 11.0
        with pytest.raises(DeadlineError, match="request b"):
            await other
        engines.is_silent = False
        return await ended

    assert asyncio.run(main()).request_id == "a"
    assert engines.aborted == [(0, ["a"])]


def test_a_second_batch_of_requests_is_sent_at_once():
    engines = FakeEngines(1)

    async def main():
        client = EngineClient(engines, "host-0", timeout_s=5)
        first = asyncio.create_task(client.generate(request("a")))
        await asyncio.sleep(0.005)
        second = asyncio.create_task(client.generate(request("b")))
        await asyncio.gather(first, second)

    asyncio.run(main())
    assert engines.submitted == {0: [["a"], ["b"]]}


def test_an_engine_that_dies_costs_only_its_own_requests_and_they_go_to_the_others():
    engines, lost = FakeEngines(3), []
    engines.is_silent = True

    async def main():
        client = EngineClient(engines, "host-0", timeout_s=60, when_lost=lambda *about: lost.append(about))
        waiting = [asyncio.create_task(client.generate(request(str(i)))) for i in range(6)]
        await until(lambda: all(engines.submitted.values()))
        engines.dead.add(1)
        await until(lambda: lost)
        waiting.append(asyncio.create_task(client.generate(request("after"))))
        engines.is_silent = False
        return client, [completion.request_id for completion in await asyncio.gather(*waiting)]

    client, answered = asyncio.run(main())
    assert answered == [*"012345", "after"]
    assert engines.submitted[1] == [["1", "4"]]
    sent = [name for rank in (0, 2) for names in engines.submitted[rank] for name in names]
    assert sorted(sent) == ["0", "1", "2", "3", "4", "5", "after"]
    assert client.num_sent_again == 2
    [(error, is_any_left)] = lost
    assert "rollout rank 1 died" in str(error)
    assert is_any_left


def test_without_an_engine_requests_wait_for_the_one_that_rejoins():
    engines, lost = FakeEngines(1), []
    engines.is_silent = True

    async def main():
        client = EngineClient(engines, "host-0", timeout_s=60, when_lost=lambda *about: lost.append(about))
        first = asyncio.create_task(client.generate(request("first")))
        await until(lambda: engines.submitted[0])
        engines.dead.add(0)
        await until(lambda: lost)
        second = asyncio.create_task(client.generate(request("second")))
        cancelled = asyncio.create_task(client.generate(request("cancelled")))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.sleep(0)
        engines.is_silent = False
        client.rejoin(engines.replace(0), [0])
        return await asyncio.gather(first, second)

    assert [completion.request_id for completion in asyncio.run(main())] == ["first", "second"]
    assert engines.submitted == {0: [["first"], ["first", "second"]]}
    assert not lost[0][1]


def test_a_replacement_is_asked_again_although_the_client_has_not_seen_the_death():
    """The driver saw it first. The call to the process that died ends later, and says nothing about the new one."""
    engines, lost = FakeEngines(2), []
    engines.is_silent = True

    async def main():
        client = EngineClient(engines, "host-0", timeout_s=60, when_lost=lambda *about: lost.append(about))
        waiting = [asyncio.create_task(client.generate(request(name))) for name in "ab"]
        await until(lambda: all(engines.submitted.values()))
        engines.dead.add(1)
        client.rejoin(engines.replace(1), [1])
        await until(lambda: sum(map(len, engines.submitted.values())) == 3)  # while the other engine has its request
        engines.is_silent = False
        return await asyncio.gather(*waiting)

    assert [completion.request_id for completion in asyncio.run(main())] == ["a", "b"]
    assert engines.submitted == {0: [["a"]], 1: [["b"], ["b"]]}
    assert lost == []


def test_a_request_that_fails_fails_alone():
    engines = FakeEngines(1)
    engines.failing.add("1")

    async def main():
        client = EngineClient(engines, "host-0", timeout_s=60)
        return await asyncio.gather(*(client.generate(request(str(i))) for i in range(3)), return_exceptions=True)

    first, failed, last = asyncio.run(main())
    assert (first.request_id, last.request_id) == ("0", "2")
    assert isinstance(failed, NonFiniteError)
    assert "request 1 is not finite" in str(failed)


def test_requests_that_nobody_waits_for_are_aborted_in_one_call_per_engine():
    engines = FakeEngines(2)
    engines.is_silent = True

    async def main():
        client = EngineClient(engines, "host-0", timeout_s=60)
        tasks = [asyncio.create_task(client.generate(request(str(i)))) for i in range(6)]
        await until(lambda: all(engines.submitted.values()))
        for task in tasks[:3]:
            task.cancel()
        await asyncio.wait(tasks[:3])
        await until(lambda: len(engines.aborted) == 2)
        client.abort(["4", "unknown"])
        await until(lambda: len(engines.aborted) == 3)
        assert not tasks[4].done()  # the engine returns what it has sampled
        engines.is_silent = False
        return await asyncio.gather(*tasks[3:])

    assert [completion.request_id for completion in asyncio.run(main())] == ["3", "4", "5"]
    assert engines.aborted == [(0, ["0", "2"]), (1, ["1"]), (0, ["4"])]


def test_an_engine_forgets_what_a_lost_client_asked_for(tmp_path):
    """The id is free again, nothing is kept for the one who is gone, and parts can be offloaded."""
    from loop_cases import make_task

    from hotseat import faults
    from hotseat.loop.workers.engine_worker import EngineWorker
    from hotseat.rollout.kinds import EngineSettings

    def step_when_called(point):
        """End a step when the next command waits, so that it finds requests under way."""
        while not engine._engine._thread._commands:
            time.sleep(0.001)

    make_task(tmp_path)
    engine = EngineWorker(EngineSettings(ModelSource(str(tmp_path / "model")), 16, 1, (1,), "float32", 1))
    with mock.patch.object(faults, "reach", side_effect=step_when_called), closing(engine):
        long = [Request(name, (3, 4), Sampling(14, ignore_eos=True), seed) for seed, name in enumerate("abcd")]
        engine.submit("lost", long)
        engine.drop_requests()
        assert engine.fetch("lost", 0.0) == []
        engine.submit("new", long)
        engine.abort(["a", "b", "c", "d"])
        assert {completion.finish for completion in fetch_all(engine, "new", 4)} == {"abort"}
        engine.offload(["kv_cache"])


def test_a_request_that_an_engine_refuses_does_not_fail_those_submitted_with_it(tmp_path):
    from loop_cases import make_task

    from hotseat.errors import UserError
    from hotseat.loop.workers.engine_worker import EngineWorker
    from hotseat.rollout.kinds import EngineSettings

    make_task(tmp_path)
    engine = EngineWorker(EngineSettings(ModelSource(str(tmp_path / "model")), 16, 4, (1,), "float32", 1))
    try:
        engine.submit("me", [request("good"), Request("bad", (99,), Sampling(1), 0), request("last")])
        outcomes = {outcome.request_id: outcome for outcome in fetch_all(engine, "me", 3)}
        assert isinstance(outcomes["bad"], FailedRequest)
        assert isinstance(outcomes["bad"].error, UserError)
        assert len(outcomes["good"].token_ids) == len(outcomes["last"].token_ids) == 1
    finally:
        engine.close()


@pytest.mark.timeout(120)
def test_a_canary_is_answered_while_the_engine_pauses(tmp_path):
    from loop_cases import make_task

    from hotseat.loop.workers.engine_worker import EngineWorker
    from hotseat.rollout.kinds import EngineSettings

    make_task(tmp_path)
    engine = EngineWorker(EngineSettings(ModelSource(str(tmp_path / "model")), 16, 2, (1,), "float32", 1))
    with closing(engine):
        engine.pause()
        engine.submit("host", [request("held")])
        [answer] = engine.answer([Request("canary", (3, 4), Sampling(5, ignore_eos=True), 0)])
        assert len(answer) == 5
        assert engine.health().is_paused
        assert engine.fetch("host", 0.0) == []  # it has not begun
        engine.resume()
        [held] = fetch_all(engine, "host", 1)
        assert held.request_id == "held"


def fetch_all(engine, client: str, count: int) -> list:
    """Return so many outcomes; each fetch waits for the first of those that are left."""
    outcomes: list = []
    while len(outcomes) < count:
        fetched = engine.fetch(client, 60.0)
        assert fetched, "no outcome in 60 s"
        outcomes += fetched
    return outcomes


def test_tokens_of_a_request_that_streams_reach_who_listens_before_it_is_complete():
    class Streaming(FakeEngines):
        """Reports a token with each fetch before it answers."""

        def __init__(self):
            super().__init__(2)
            self.reports = {0: [(0, (7,)), (1, (8, 9))], 1: [(0, (7, 8))]}

        async def answer(self, rank, method, client, *args):
            if method == "fetch" and self.ready[rank] and self.reports[rank]:
                await asyncio.sleep(0.01)
                return [[SampledTokens(name, *self.reports[rank].pop(0)) for name in self.ready[rank]]]
            if method == "fetch" and rank == 0:
                self.dead.add(0)
            return await super().answer(rank, method, client, *args)

    heard: list[tuple[int, ...]] = []

    async def main():
        client = EngineClient(Streaming(), "host-0", timeout_s=60)
        client.listen("a", heard.append)
        return await client.generate(replace(request("a"), streams=True))

    assert asyncio.run(main()).token_ids == (1,)
    assert heard == [(7,), (7, 8, 9), (7, 8)]  # the second engine began anew


@pytest.mark.parametrize("is_before", [True, False])
def test_tokens_of_an_engine_whose_requests_were_sent_elsewhere_are_not_heard(is_before):
    """The driver may replace an engine while a fetch of the old one is on its way."""

    class WorkerTimeout(FakeEngines):
        def __init__(self):
            super().__init__(1)
            self.is_late, self.may_report = asyncio.Event(), asyncio.Event()

        async def answer(self, rank, method, client, *args):
            if method == "fetch" and not self.is_late.is_set():
                self.is_late.set()
                await self.may_report.wait()
                return [[SampledTokens("a", 5, (6,))]]
            return await super().answer(rank, method, client, *args)

    heard: list[tuple[int, ...]] = []

    async def main():
        late = WorkerTimeout()
        client = EngineClient(late, "host-0", timeout_s=60)
        client.listen("a", heard.append)
        asking = asyncio.ensure_future(client.generate(replace(request("a"), streams=True)))
        await late.is_late.wait()
        client.rejoin(FakeEngines(1), [0])
        if is_before:
            late.may_report.set()
        answer = await asking  # fetched from the new engine, whether the old one answers or not
        late.may_report.set()
        return answer

    assert asyncio.run(main()).token_ids == (1,)
    assert heard == []


@pytest.mark.slow
def test_an_engine_process_hands_over_tokens_while_it_samples(tmp_path):
    """Also while other requests of the same client end in every step."""
    from loop_cases import make_task, rl_yaml

    from hotseat import faults
    from hotseat.config import loads
    from hotseat.loop.settings.rollout_settings import engine_settings
    from hotseat.loop.workers.engine_worker import EngineWorker

    task = make_task(tmp_path, seed=0)
    worker = EngineWorker(engine_settings(loads(rl_yaml(task), ["data.max_length=32"]), (1,), task))
    sampling = Sampling(24, ignore_eos=True)
    streams = Request("streams", (3, 12), sampling, 0, streams=True)
    short = [Request(f"short-{length}", (3, 12), Sampling(length, ignore_eos=True), length) for length in range(1, 24)]
    steps = threading.Semaphore(1)  # each waits for a fetch, until some tokens were reported
    with mock.patch.object(faults, "reach", side_effect=lambda point: steps.acquire(timeout=60)):
        worker.submit("host-0", [streams, replace(streams, id="whole", streams=False), *short])
        worker.submit("host-1", [replace(streams, id="another", streams=False)])
        tokens: tuple[int, ...] = ()
        outcomes: list[Completion] = []
        num_reports = 0
        while len(outcomes) < 2 + len(short):
            news = worker.fetch("host-0", 5.0)
            steps.release(1 if num_reports < 3 else 1000)
            for outcome in news:
                if isinstance(outcome, Completion):
                    outcomes.append(outcome)
                else:
                    assert isinstance(outcome, SampledTokens)
                    assert (outcome.request_id, outcome.start) == ("streams", len(tokens))
                    tokens += outcome.token_ids
                    num_reports += 1
        [another] = worker.fetch("host-1", 60.0)
    assert num_reports > 2
    first, second = (each for each in outcomes if each.request_id in ("streams", "whole"))
    assert first.token_ids == second.token_ids == another.token_ids
    assert first.token_ids[: len(tokens)] == tokens
    assert worker.fetch("host-0", 0.0) == []
