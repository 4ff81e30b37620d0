"""Batches from group to group: `send_to` and `recv_from` in one process."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch

from hotseat.errors import DeadlineError, PlacementError, UserError, WorkerError
from hotseat.rlinf import Channel, NodePlacementStrategy, Worker, broker, rank_rows
from hotseat.rlinf.broker import Broker
from hotseat.rlinf.queues import QueueDirectory
from hotseat.rlinf.rank_rows import RankRows, merge, num_rows, parts_to_receive, parts_to_send, split


class Member(Worker):
    def give(self, group, channel, num_rows, **options):
        """Send rows that count through the batch, in a dict."""
        rows = torch.arange(self._rank * num_rows, (self._rank + 1) * num_rows)
        batch = {"rows": rows, "nested": {"array": rows.numpy(), "list": rows.tolist()}, "step": 7, "none": None}
        work = self.send_to(group, channel, batch, **options)
        return work.wait() if work is not None else None

    def take(self, group, channel, **options):
        received = self.recv_from(group, channel, **options)
        return received.wait() if options.get("async_op") else received

    async def take_later(self, group, channel, **options):
        return await self.recv_from(group, channel, async_op=True, **options).async_wait()

    def give_rows(self, group, channel, rows, **options):
        self.send_to(group, channel, rows, **options)

    def give_text(self, group, channel, text):
        """Send a text of a letter per row, whose parts it cuts itself."""
        self.send_to(group, channel, text, batch_size=len(text) * self._world_size, split_fn=cut)

    def take_text(self, group, channel, batch_size):
        return self.recv_from(group, channel, batch_size=batch_size, merge_fn="".join, infer_batch_size_fn=len)

    def give_one_part(self, group, channel):
        self.send_to(group, channel, "ab", batch_size=4, split_fn=lambda text, sizes: [text])


def cut(text, sizes):
    ends = [sum(sizes[: at + 1]) for at in range(len(sizes))]
    return [text[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def launched(cluster, name, size):
    return Member.create_group().launch(cluster, name=name, placement_strategy=NodePlacementStrategy([0] * size))


def test_the_rows_of_two_senders_are_shared_among_three_receivers():
    # Rows 0 to 5 and 6 to 11; receivers have 0 to 3, 4 to 7 and 8 to 11.
    assert [parts_to_send(12, 2, 3, rank) for rank in range(2)] == [
        [RankRows(0, 4), RankRows(1, 2)],
        [RankRows(1, 2), RankRows(2, 4)],
    ]
    received = [parts_to_receive(12, 2, 3, rank) for rank in range(3)]
    assert received == [[RankRows(0, 4)], [RankRows(0, 2), RankRows(1, 2)], [RankRows(1, 4)]]


@pytest.mark.parametrize(("num_senders", "num_receivers"), [(1, 1), (1, 4), (4, 1), (3, 4), (6, 4), (5, 5)])
def test_every_row_has_one_sender_and_one_receiver_that_agree(num_senders, num_receivers):
    total = num_senders * num_receivers * 2
    sent = {
        (rank, part.rank): part.num_rows
        for rank in range(num_senders)
        for part in parts_to_send(total, num_senders, num_receivers, rank)
    }
    received = {
        (part.rank, rank): part.num_rows
        for rank in range(num_receivers)
        for part in parts_to_receive(total, num_senders, num_receivers, rank)
    }
    assert sent == received
    assert all(size > 0 for size in sent.values())
    for rank in range(num_receivers):
        assert sum(size for (_, receiver), size in sent.items() if receiver == rank) == total // num_receivers


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("is_direct", [False, True])
def test_a_batch_goes_from_two_workers_to_three_and_back_to_one(cluster, is_direct, is_async):
    senders, receivers, last = (launched(cluster, name, size) for name, size in (("two", 2), ("three", 3), ("one", 1)))
    channel = None if is_direct else Channel.create("rows")
    options = {"enable_p2p": is_direct, "async_op": is_async}
    given = senders.give("three", channel, 6, **options)
    batches = receivers.take("two", channel, batch_size=12, **options).wait()
    assert given.wait() == [None, None]
    assert [batch["rows"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    middle = batches[1]["nested"]
    assert isinstance(middle["array"], numpy.ndarray)
    assert middle["array"].tolist() == middle["list"] == [4, 5, 6, 7]
    assert [(batch["step"], batch["none"]) for batch in batches] == [(7, None)] * 3
    receivers.give("one", channel, 4, **options).wait()
    assert last.take("three", channel, batch_size=12, **options).wait()[0]["rows"].tolist() == list(range(12))


@pytest.mark.parametrize("is_direct", [False, True])
def test_tags_modes_and_keys_keep_streams_apart_and_each_keeps_its_order(cluster, is_direct):
    senders, receivers = launched(cluster, "two", 2), launched(cluster, "one", 1)
    channel = None if is_direct else Channel.create("streams")
    for number, options in enumerate([{}, {"tag": "a"}, {"mode": "train", "tag": "a"}, {"route_key": 3}, {}]):
        senders.give_rows("one", channel, [number], enable_p2p=is_direct, **options).wait()
    streams = [{"route_key": 3}, {"tag": "train_a"}, {"tag": "a"}, {}, {}]
    received = [
        receivers.take("two", channel, batch_size=2, enable_p2p=is_direct, **options).wait()[0] for options in streams
    ]
    assert received == [[3, 3], [2, 2], [1, 1], [0, 0], [4, 4]]


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_route_key_without_a_form_that_all_processes_share_is_refused(cluster, is_direct):
    senders = launched(cluster, "two", 2)
    launched(cluster, "one", 1)
    channel = None if is_direct else Channel.create("keys")
    sent = senders.give_rows("one", channel, [1], enable_p2p=is_direct, route_key=object())
    with pytest.raises(WorkerError, match=r"the key <object object at 0x\w+> is a builtins.object, which has no form"):
        sent.wait()


def test_a_coroutine_receives_and_functions_of_ones_own_cut_and_put_together(cluster):
    senders, receivers = launched(cluster, "two", 2), launched(cluster, "one", 1)
    channel = Channel.create("texts")
    senders.give_rows("one", channel, ["row"]).wait()
    later = receivers.take_later("two", channel, batch_size=2)
    assert asyncio.run(later.async_wait()) == [["row", "row"]]
    receivers.give_text("two", channel, "abcd").wait()
    assert senders.take_text("one", channel, 4).wait() == ["ab", "cd"]


def test_a_group_that_was_closed_and_launched_again_has_its_new_size(cluster):
    launched(cluster, "others", 1).close()
    others, senders = launched(cluster, "others", 2), launched(cluster, "senders", 1)
    channel = Channel.create("again")
    senders.give_rows("others", channel, [1, 2]).wait()
    assert others.take("senders", channel, batch_size=2).wait() == [[1], [2]]


def test_what_cannot_be_routed_is_refused(cluster):
    senders, receivers = launched(cluster, "two", 2), launched(cluster, "three", 3)
    channel = Channel.create("refused")
    refused = [
        (senders, [channel, [1]], {}, "a batch of 2 rows cannot be shared evenly among 2 senders and 3"),
        (senders, [channel, [1]], {"batch_size": 6}, r"1 rows are to be sent as (2 \+ 1|1 \+ 2)"),
        (senders, [channel, (1, 2, 3)], {}, "a tuple has no rows: send tensors, arrays, lists"),
        (senders, [None, [1, 2, 3]], {}, "send_to needs a channel, or enable_p2p=True"),
        (senders, [channel, [1]], {"decoupled_mode": True}, "send_to: decoupled_mode is not here"),
        (receivers, [channel], {}, "recv_from needs batch_size, the rows that all workers"),
        (receivers, [None], {"batch_size": 6}, "recv_from needs a channel"),
    ]
    for group, arguments, options, message in refused:  # one at a time: any wait raises the failure of another call
        call = (
            group.give_rows("three", *arguments, **options)
            if group is senders
            else group.take("two", *arguments, **options)
        )
        with pytest.raises(WorkerError, match=message):
            call.wait()
    senders.execute_on(1).give_one_part("two", channel).wait()  # two workers to two: one part is right
    with pytest.raises(WorkerError, match="split_fn returned 1 parts for the sizes"):
        launched(cluster, "one", 1).give_one_part("two", channel).wait()


def test_a_part_of_another_size_is_named(cluster):
    senders, receivers = launched(cluster, "two", 2), launched(cluster, "one", 1)
    channel = Channel.create("sizes")
    senders.give_rows("one", channel, [1, 2]).wait()
    with pytest.raises(WorkerError, match=r"two\[0\] sent 2 rows to one\[0\], which expects 1 of batch_size 2"):
        receivers.take("two", channel, batch_size=2).wait()


def test_a_group_that_nobody_launches_is_named_at_the_deadline(cluster, monkeypatch):
    monkeypatch.setattr(rank_rows, "_LOOK_UP_S", 0.1)  # much less than the deadline of the call
    alone = launched(cluster, "alone", 1)
    with pytest.raises(WorkerError, match="there is no group 'nobody' to exchange batches with"):
        alone.give_rows("nobody", Channel.create("none"), [1]).wait()


def killed_at_its_answer(number, is_before, call) -> None:
    """Run the call in a fork that is killed before or after it receives this answer of the broker, counted from 1."""
    child = os.fork()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        return
    try:
        receive, answers = broker._receive, itertools.count(1)

        def receive_and_die(connection):
            is_last = next(answers) == number
            if is_last and is_before:
                os.kill(os.getpid(), signal.SIGKILL)
            received = receive(connection)
            if is_last:
                os.kill(os.getpid(), signal.SIGKILL)
            return received

        broker._receive = receive_and_die
        call()
    finally:
        os._exit(1)


@pytest.fixture
def directory(tmp_path):
    broker = Broker(str(tmp_path))
    yield QueueDirectory(broker.address, 60.0)
    broker.close()


@pytest.mark.parametrize("is_before", [True, False], ids=["before the answer", "after the answer"])
def test_the_end_of_a_process_that_looks_something_up_concerns_nobody(directory, is_before):
    Channel.create_in(directory, "known", maxsize=3)
    rank_rows.record_size(directory, "group", 2)
    for look_up in (
        lambda: Channel.connect_in(directory, "known"),
        lambda: Channel.create_in(directory, "known"),
        lambda: rank_rows.group_size(directory, "group"),
    ):
        killed_at_its_answer(2, is_before, look_up)  # the first is to its greeting
        assert Channel.connect_in(directory, "known").maxsize() == 3
        assert rank_rows.group_size(directory, "group") == 2


def test_the_end_of_a_process_that_waits_for_what_is_not_there_concerns_nobody(directory):
    killed_at_its_answer(2, True, lambda: Channel.connect_in(directory, "later"))
    killed_at_its_answer(2, True, lambda: rank_rows.group_size(directory, "later"))
    killed_at_its_answer(2, False, lambda: Channel.create_in(directory, "later", maxsize=3))
    rank_rows.record_size(directory, "later", 2)
    assert Channel.connect_in(directory, "later").maxsize() == 3
    assert rank_rows.group_size(directory, "later") == 2


def test_a_group_that_is_launched_again_has_its_new_size(directory):
    rank_rows.record_size(directory, "group", 2)
    rank_rows.record_size(directory, "group", 1)
    assert [rank_rows.group_size(directory, "group") for _ in range(2)] == [1, 1]


def test_what_is_looked_up_before_it_is_there_is_waited_for(directory):
    for where in (directory, QueueDirectory(None, 60.0)):
        with ThreadPoolExecutor(2) as threads:
            looking = [threads.submit(rank_rows.group_size, where, "group") for _ in range(2)]
            rank_rows.record_size(where, "group", 5)
            assert [each.result(60) for each in looking] == [5, 5]


def test_what_nobody_records_is_named_at_the_deadline(directory, monkeypatch):
    monkeypatch.setattr(rank_rows, "_LOOK_UP_S", 0.1)
    monkeypatch.setattr("hotseat.rlinf.channel._CONNECT_S", 0.1)
    for where in (directory, QueueDirectory(None, 60.0)):
        for find in (rank_rows.group_size, Channel.connect_in):
            with pytest.raises(PlacementError, match="there is no (group|channel) 'later'"):
                find(where, "later")
        with pytest.raises(DeadlineError, match=r"waited 0\.1 s for 'later', which nobody has recorded"):
            where.look_up("later", timeout_s=0.1)


def test_parts_of_tensors_have_memory_of_their_own():
    whole = torch.arange(8)
    parts = split(whole, [2, 6])
    assert parts[0].untyped_storage().nbytes() == 2 * whole.element_size()
    assert split(whole, [8])[0] is whole


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([[1], {"a": [1]}], "several types: dict, list; set merge_fn"),
        ([{"a": [1]}, {"b": [1]}], "different keys"),
        ([{"a": 1}, {"a": 2}], "different values, such as 1 and 2: set merge_fn"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(parts, message):
    with pytest.raises(UserError, match=message):
        merge(parts)


def test_values_without_rows_are_in_every_part():
    batch = {"rows": [1, 2, 3], "nested": {"scalar": torch.tensor(2.0), "number": numpy.float32(4)}, "step": 7}
    parts = split(batch, [1, 2])
    assert [part["rows"] for part in parts] == [[1], [2, 3]]
    assert [(part["nested"]["scalar"].item(), part["nested"]["number"], part["step"]) for part in parts] == [
        (2, 4, 7)
    ] * 2
    assert merge(parts) == batch


def test_rows_of_a_dict_are_those_of_the_first_value_that_has_some():
    assert num_rows({"step": 3, "none": None, "nested": {"rows": torch.zeros(5, 2)}}) == 5
    assert num_rows({"info": {"step": 3}, "nothing": {}, "rows": [1, 2]}) == 2
    with pytest.raises(UserError, match="a dict has no rows"):
        num_rows({"step": 3})
