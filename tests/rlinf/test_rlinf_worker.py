"""RLinf's API in one process: channels, messages, device locks and handles."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time

import pytest

from hotseat import rlinf
from hotseat.errors import PlacementError, RunError, WorkerError
from hotseat.rlinf import Channel, Cluster, NodePlacementStrategy, PackedPlacementStrategy, Worker, WorkerGroup
from hotseat.rlinf.queues import QueueDirectory

USES: list[tuple[str, str]] = []  # of a device


class Caller(Worker):
    def __init__(self, greeting="hi"):
        super().__init__()
        self.greeting = f"{greeting} from {self._rank} of {self._world_size}"

    @Worker.timer("greet")
    def greet(self):
        return self.greeting

    async def greet_later(self):
        return self.greeting

    def devices(self):
        return self.global_accelerator_ids, self.has_accelerator, repr(self)

    def nap(self):
        with self.worker_timer("nap"):
            time.sleep(0.001)


class Member(Worker):
    def swap(self, other):
        self.send(self._rank, other, self._rank)
        return self.recv(other, self._rank)

    def send_all(self, payload):
        self.send("with a payload", "receivers", 0, piggyback_payload=payload)

    def send_to_both(self):
        self.send("for both", "receivers", [0, 1])

    def receive(self):
        return self.recv("senders", 0)

    def share(self, value):
        groups = [("senders", 0), ("receivers", [0, 1])]
        return self.broadcast(value if self._group_name == "senders" else None, groups=groups)

    def lock_twice(self):
        with self.device_lock:
            self.device_lock.acquire()
            self.device_lock.release()
        with pytest.raises(RunError, match="is not held"):
            self.device_lock.release()

    def use_device(self):
        with self.device_lock:
            USES.append(("in", self._group_name))
            time.sleep(0.002)
            USES.append(("out", self._group_name))

    def send_zero(self, other):
        self.send(0, other, 0)

    def fail(self):
        raise KeyError("nothing there")

    def fail_one_after_the_other(self, others_may):
        if self._rank > 0:
            others_may.get()
        raise KeyError(f"nothing on {self._rank}")


def test_a_group_calls_its_workers_by_method_name_and_some_of_them_by_rank(cluster):
    group = Caller.create_group(greeting="hello").launch(cluster, name="callers")
    assert group.greet().wait() == [f"hello from {rank} of 4" for rank in range(4)]
    assert group.execute_on(3, 1).greet().wait() == ["hello from 1 of 4", "hello from 3 of 4"]
    assert asyncio.run(group.greet_later().async_wait())[2] == "hello from 2 of 4"
    assert group.devices().wait()[2] == ([2], True, "callers(rank=2)")
    assert WorkerGroup.from_group_name(Caller, "callers").world_size == 4
    with pytest.raises(AttributeError, match="Caller has no method 'greet_me' to call on group 'callers'; it has"):
        group.greet_me()
    with pytest.raises(PlacementError, match="there is no group 'others'; there are callers"):
        WorkerGroup.from_group_name(Caller, "others")


def test_timers_of_all_workers_are_reduced_and_start_again_at_zero(cluster):
    group = Caller.create_group().launch(cluster, name="callers", placement_strategy=PackedPlacementStrategy(0, 1))
    handle = group.greet()
    longest, all_times = handle.consume_duration(return_per_rank=True)
    assert longest == max(all_times) > 0
    napped = group.nap().consume_durations("min")
    assert list(napped) == ["nap"]
    assert napped["nap"] >= 0.001
    with pytest.raises(WorkerError, match="there is no timer 'nap'; there are none"):
        group.call("pop_execution_time", "nap").wait()


def test_a_failure_is_raised_once_by_its_own_wait_or_else_by_the_next(cluster):
    one = NodePlacementStrategy([0])
    failing = Member.create_group().launch(cluster, name="failing", placement_strategy=one)
    patient = Member.create_group().launch(cluster, name="patient", placement_strategy=one)
    waiting = patient.swap("failing")  # nothing will come
    with pytest.raises(WorkerError, match="failing rank 0: 'fail' raised KeyError"):
        failing.fail().wait()
    assert not cluster.failures.first.done()
    failing.fail()
    with pytest.raises(WorkerError, match="failing rank 0: 'fail' raised KeyError"):
        waiting.wait()
    failing.send_zero("patient").wait()
    assert waiting.wait() == [0]


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_of_several_workers_that_fail_in_one_call_one_is_raised_once(cluster, is_waited_for):
    group = Member.create_group().launch(cluster, name="failing", placement_strategy=NodePlacementStrategy([0, 0]))
    patient = Member.create_group().launch(cluster, name="patient", placement_strategy=NodePlacementStrategy([0]))
    others_may = Channel.create(f"others may, {is_waited_for}")
    handle, waiting = group.fail_one_after_the_other(others_may), patient.swap("failing")
    with pytest.raises(WorkerError, match="failing rank 0: .*nothing on 0"):
        (handle if is_waited_for else waiting).wait()
    others_may.put("go on")
    concurrent.futures.wait(handle._results.values())
    assert not cluster.failures.first.done()  # the second failure is of a call that somebody knows to have failed
    group.execute_on(0).send_zero("patient").wait()
    assert waiting.wait() == [0]
    with pytest.raises(WorkerError, match="failing rank"):
        handle.wait()


def test_workers_send_to_each_other_with_a_payload_and_to_all(cluster):
    pair = NodePlacementStrategy([0, 0])
    senders = Member.create_group().launch(cluster, name="senders", placement_strategy=pair)
    receivers = Member.create_group().launch(cluster, name="receivers", placement_strategy=pair)
    there, back = senders.swap("receivers"), receivers.swap("senders")
    assert there.wait() == back.wait() == [0, 1]
    senders.execute_on(0).send_all({"key": 1}).wait()
    assert receivers.execute_on(0).receive().wait() == [("with a payload", {"key": 1})]
    shared = senders.execute_on(0).share("to everybody")
    assert receivers.share(None).wait() == ["to everybody"] * 2
    assert shared.wait() == ["to everybody"]
    with pytest.raises(WorkerError, match=r"dst_rank is \[0, 1\]: there are no child workers here; name one rank"):
        senders.execute_on(0).send_to_both().wait()


def test_a_device_is_held_by_one_worker_at_a_time(cluster):
    USES.clear()
    on_0 = PackedPlacementStrategy(0, 0)
    groups = [Member.create_group().launch(cluster, name=name, placement_strategy=on_0) for name in ("a", "b")]
    for group in groups:
        group.lock_twice().wait()
    for handle in [group.use_device() for group in groups for _ in range(3)]:
        handle.wait()
    assert [kind for kind, _ in USES] == ["in", "out"] * 6
    assert all(entered[1] == left[1] for entered, left in zip(USES[::2], USES[1::2], strict=True))


def test_items_of_one_key_come_in_order_and_batches_by_weight(cluster):
    channel = Channel.create("lengths")
    for item, weight in (("a", 2), ("b", 2), ("c", 3), ("d", 9), ("e", 1)):
        channel.put(item, weight=weight, key=("length", 1))
    assert channel.get_batch(4, key=("length", 1)) == ["a", "b"]
    assert channel.get_batch(4, key=("length", 1)) == ["c"]  # with d it would be too heavy
    assert channel.get_batch(4, key=("length", 1)) == ["d"]  # too heavy by itself
    assert channel.qsize(key=("length", 1)) == 1
    assert channel.get_batch(key=("length", 1)) == ["e"]
    assert channel.empty()
    with pytest.raises(asyncio.QueueEmpty, match="channel 'lengths' has no item with key 'default_queue'"):
        channel.get_nowait()


def test_asynchronous_puts_and_gets_keep_their_order(cluster):
    channel = Channel.create("numbers")
    gets = [channel.get(async_op=True) for _ in range(3)]
    puts = [channel.put(number, async_op=True) for number in range(2)]
    channel.put(2)  # after the two before it, though they are not waited for
    assert [work.wait() for work in gets] == [0, 1, 2]
    assert [work.wait() for work in puts] == [None, None]
    assert all(work.done() for work in [*gets, *puts])
    waiting = channel.get_batch(3, async_op=True)
    channel.put("one", weight=1)
    assert not waiting.done()
    channel.put("two", weight=2)
    assert waiting.wait() == ["one", "two"]


def test_a_channel_is_bounded_per_key_and_found_by_name(cluster):
    Channel.create("small", maxsize=1)
    channel = Channel.connect("small")
    again = Channel.create("small", maxsize=5)
    assert (channel.maxsize(), again.maxsize()) == (1, 1)
    channel.put("x", key="a")
    assert channel.full(key="a")
    assert not again.full(key="b")
    with pytest.raises(asyncio.QueueFull, match="channel 'small', key 'a': 1 items wait"):
        again.put_nowait("y", key="a")
    assert again.get(key="a") == "x"
    again.put_nowait("y", key="a")
    with pytest.raises(PlacementError, match="maxsize is -1"):
        Channel.create("smaller", maxsize=-1)
    private = Channel.create("small", local=True)
    assert private.empty(key="a")


def test_a_channel_whose_items_wait_elsewhere_is_found_by_its_name():
    here, elsewhere = QueueDirectory(None, 60.0), QueueDirectory(None, 60.0)
    made = Channel.create_in(here, "far", maxsize=3, items_in=elsewhere)
    made.put("an item")
    found = Channel.connect_in(here, "far")
    assert (found.get(), found.maxsize()) == ("an item", 3)
    assert Channel.create_in(here, "far").maxsize() == 3


def test_there_is_one_cluster_in_a_program(cluster):
    assert Cluster() is cluster
    assert Cluster(num_nodes=1) is cluster
    assert (cluster.num_nodes, cluster.num_accelerators, cluster.num_accelerators_in_node(0)) == (1, 4, 4)
    with pytest.raises(PlacementError, match="a cluster of 1 nodes already, not 2"):
        Cluster(num_nodes=2)


def test_a_worker_outside_of_a_group_has_no_place(cluster):
    with pytest.raises(RunError, match="Member belongs to no group"):
        assert Member().device_lock is None
    with pytest.raises(PlacementError, match="isolate_gpu=False would show every device"):
        Member.create_group().launch(cluster, isolate_gpu=False)


def test_a_channel_that_nobody_creates_is_named_at_the_deadline(machinery, monkeypatch):
    monkeypatch.setenv("RLINF_TIMEOUT", "0.0005")
    with Cluster(on=machinery) as cluster:
        with pytest.raises(PlacementError, match=r"there is no channel 'nowhere': create it first, by Channel.create"):
            Channel.connect("nowhere")
        with pytest.raises(PlacementError, match="node_rank is 3; the nodes are 0 to 0"):
            Channel.create("far", node_rank=3)
        assert cluster.default_timeout_s() == pytest.approx(0.03)


def test_an_unknown_reduction_is_named(cluster):
    group = Caller.create_group().launch(cluster, name="callers", placement_strategy=NodePlacementStrategy([0]))
    with pytest.raises(ValueError, match="reduction_type is 'sum'; it can be max, min, mean"):
        group.greet().consume_duration("sum")


def test_the_module_has_the_names_that_it_lists():
    assert all(getattr(rlinf, name) for name in rlinf.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Megatron'"):
        rlinf.Megatron  # noqa: B018
