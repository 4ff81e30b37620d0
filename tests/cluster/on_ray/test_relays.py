"""Relays: how many calls the driver makes, and in which order and when ranks and driver get what is theirs."""

import asyncio
import threading
from concurrent.futures import Future

import pytest

from hotseat.cluster.on_ray.relays import RANKS_PER_RELAY, KeptRefs, Relay, RelayLost, Relays, Unanswered
from hotseat.cluster.worker_process import Failure

NO_ARGUMENTS = ((), {})


class Actor:
    """Stands for the actor of a rank: it notes calls, and answers what `answer` returns, which may be awaitable."""

    def __init__(self, answer=lambda method: method):
        self.answer = answer
        self.calls = []
        self.num_returns = None

    @property
    def invoke(self):
        return self

    invoke_and_keep = invoke

    def options(self, num_returns):
        self.num_returns = num_returns
        return self

    def remote(self, method, args, kwargs, timeout_s, *keep):
        self.calls.append((method, args))
        if keep:
            return [self._answered(None), *(f"ref {index}" for index in range(self.num_returns - 1))]
        return self._answered(self.answer(method))

    async def _answered(self, answer):
        if asyncio.isfuture(answer):
            answer = await answer
        if isinstance(answer, Exception):
            raise answer
        return answer


class Sent:
    """Notes the calls to relays, each with its future."""

    def __init__(self):
        self.calls = []
        self.changed = threading.Condition()

    def __call__(self, relay, method, args, timeout_s):
        if "lock" in str(args):
            raise TypeError("cannot be pickled")
        answered = Future()
        with self.changed:
            self.calls.append((relay, method, args, answered))
            self.changed.notify_all()
        return answered

    def named(self, method):
        return [each for each in self.calls if each[1] == method]

    def wait_for(self, method):
        with self.changed:
            assert self.changed.wait_for(lambda: self.named(method), 60)
        return self.named(method)[-1]


def test_a_call_of_thousands_of_ranks_is_a_call_of_each_relay():
    sent, ranks, num_relays = Sent(), range(2048), 2048 // RANKS_PER_RELAY
    relays = Relays(None, sent)
    relays.know(dict.fromkeys(ranks, "actor"))
    assert sent.calls == []  # they learn of actors when they are called
    for number in (1, 2):
        futures = relays.call("update", dict.fromkeys(ranks, NO_ARGUMENTS), 60.0, None)
        begun = sent.named("call")[-num_relays:]
        assert [relay for relay, *_ in begun] == [*range(num_relays)]
        assert {args[0] for _, _, args, _ in begun} == {number}
        for _, _, args, answered in begun:
            answered.set_result({rank: f"{rank} answers" for rank in args[2]})
        assert [futures[rank].result(0) for rank in ranks] == [f"{rank} answers" for rank in ranks]
    assert len(sent.calls) == 3 * num_relays


def test_those_that_are_missing_are_waited_for_after_a_failure_and_after_the_time():
    sent, failure = Sent(), Failure("ValueError", "no", "", None)
    futures = Relays(None, sent).call("update", dict.fromkeys(range(3), NO_ARGUMENTS), 60.0, None)
    [(_, _, _, answered)] = sent.calls
    answered.set_result({1: failure})
    assert futures[1].result(0) is failure
    _, _, args, late = sent.wait_for("rest")
    assert args == (0, 60.0)
    assert not futures[0].done()
    late.set_result({0: "late", 2: "too"})
    assert [futures[rank].result(0) for rank in (0, 2)] == ["late", "too"]
    assert len(sent.calls) == 2


def test_a_call_that_cannot_be_sent_does_not_hold_up_the_next():
    sent = Sent()
    relays = Relays(None, sent)
    with pytest.raises(TypeError, match="pickled"):
        relays.call("update", {0: (("lock",), {})}, 60.0, None)
    relays.call("update", {0: NO_ARGUMENTS}, 60.0, None)
    assert [(method, args[0]) for _, method, args, _ in sent.calls] == [("skip", 0), ("call", 1)]


def test_ranks_are_called_in_the_order_of_the_driver_whatever_the_order_of_arrival():
    actor = Actor()

    async def main():
        relay = Relay()
        late = asyncio.ensure_future(relay.call(2, "pack_next", {7: NO_ARGUMENTS}, 60.0, None))
        early = asyncio.ensure_future(relay.call(1, "broadcast", {7: NO_ARGUMENTS}, 60.0, None))
        await asyncio.sleep(0)
        assert actor.calls == []
        await relay.know(0, {7: actor})
        return await early, await late

    assert asyncio.run(main()) == ({7: "broadcast"}, {7: "pack_next"})
    assert [method for method, _ in actor.calls] == ["broadcast", "pack_next"]


def test_a_failure_is_reported_while_others_still_work():
    async def main():
        relay, never = Relay(), asyncio.get_running_loop().create_future()
        failure = Failure("ValueError", "no", "", None)
        await relay.know(0, {0: Actor(), 1: Actor(lambda method: failure), 2: Actor(lambda method: never)})
        return await relay.call(1, "update", dict.fromkeys(range(3), NO_ARGUMENTS), 3600.0, None), failure

    answers, failure = asyncio.run(main())
    assert answers[1] is failure
    assert 2 not in answers


def test_an_error_of_ray_comes_back_as_it_is():
    async def main():
        relay, died = Relay(), RuntimeError("the actor died")
        await relay.know(0, {0: Actor(lambda method: died)})
        return await relay.call(1, "update", {0: NO_ARGUMENTS}, 60.0, None)

    [answer] = asyncio.run(main()).values()
    assert isinstance(answer, Unanswered)
    assert str(answer.error) == "the actor died"


def test_those_that_answered_are_known_before_the_time_is_up():
    async def main():
        relay, never = Relay(), asyncio.get_running_loop().create_future()
        await relay.know(0, {0: Actor(), 1: Actor(lambda method: never)})
        started_s = asyncio.get_running_loop().time()
        answers = await relay.call(1, "update", dict.fromkeys(range(2), NO_ARGUMENTS), 1.0, None)
        return answers, asyncio.get_running_loop().time() - started_s

    answers, seconds = asyncio.run(main())
    assert answers == {0: "update"}
    assert seconds >= 0.9


@pytest.mark.parametrize(("keep", "refs"), [(0, ["ref 0"]), (3, ["ref 0", "ref 1", "ref 2"])])
def test_kept_results_come_as_references(keep, refs):
    async def main():
        relay = Relay()
        await relay.know(0, {0: Actor()})
        return await relay.call(1, "score", {0: NO_ARGUMENTS}, 60.0, keep)

    assert asyncio.run(main()) == {0: KeptRefs(refs, keep)}


def test_the_rest_comes_later():
    async def main():
        relay, later = Relay(), asyncio.get_running_loop().create_future()
        await relay.know(0, {0: Actor(lambda method: Failure("ValueError", "no", "", None)), 1: Actor(lambda _: later)})
        first = await relay.call(1, "update", dict.fromkeys(range(2), NO_ARGUMENTS), 60.0, None)
        later.set_result("late")
        return first, await relay.rest(1, 60.0)

    first, rest = asyncio.run(main())
    assert list(first) == [0]
    assert rest == {1: "late"}


def test_a_call_of_an_unknown_rank_does_not_hold_up_the_next():
    async def main():
        relay = Relay()
        with pytest.raises(KeyError):
            await relay.call(0, "update", {0: NO_ARGUMENTS}, 60.0, None)
        await relay.know(1, {0: Actor()})
        return await relay.call(2, "update", {0: NO_ARGUMENTS}, 60.0, None)

    assert asyncio.run(main()) == {0: "update"}


def test_the_death_of_a_relay_fails_the_calls_of_its_ranks_alone():
    sent = Sent()
    futures = Relays(None, sent).call("update", dict.fromkeys((0, RANKS_PER_RELAY), NO_ARGUMENTS), 60.0, None)
    sent.calls[0][3].set_exception(RuntimeError("gone"))
    with pytest.raises(RelayLost, match="relay 0 failed"):
        futures[0].result(0)
    assert not futures[RANKS_PER_RELAY].done()
