"""Every transport brings the same bits to other processes, and who fails is named in time. (IPC: test_push_gpu.py.)"""

import datetime
import time
from dataclasses import replace

import pytest
import torch
from transport_cases import as_rank, engines, push, weights

from hotseat.algorithms.digest import tensor_digest
from hotseat.errors import DeadlineError, RunError, WeightError
from hotseat.weights.broadcast import BroadcastData, BroadcastGroup
from hotseat.weights.device_ipc import SharedData, merge
from hotseat.weights.transfer import Sender

pytestmark = pytest.mark.slow

TWO = BroadcastGroup(("engine 0", "engine 1"), "gloo", timeout_s=30.0)


def digests(named) -> dict[str, int]:
    return {name: tensor_digest(tensor) for name, tensor in named}


@pytest.fixture(scope="module")
def pair():
    """Two receiving processes for tests that do not harm them."""
    with engines(2) as made:
        yield made


@pytest.mark.parametrize("transport", ["host", "broadcast"])
def test_a_pickled_bucket_opens_in_the_process_that_iterates_it(pair, transport):
    named = weights(1)
    sender = Sender(lambda: iter(named), bucket_bytes=8192)
    push(sender, pair, 1, transport, TWO if transport == "broadcast" else None)
    for engine in pair:
        assert engine.call("finish", 1) == digests(named)
    sender.close()


def test_a_group_serves_many_pushes_and_a_tensor_above_the_bucket_size(pair):
    named = weights(2)
    sender = Sender(lambda: iter(named), bucket_bytes=8192)
    groups = set()
    for version in range(1, 4):
        named = [*weights(version), ("large", torch.full((5000 * version,), float(version)))]
        push(sender, pair, version, "broadcast", TWO)
        assert [engine.call("finish", version) for engine in pair] == [digests(named)] * 2
        groups.add(sender._broadcaster)
    assert len(groups) == 1
    push(sender, pair, 4, "broadcast", replace(TWO, generation=1))
    assert sender._broadcaster not in groups
    assert pair[1].call("finish", 4) == digests(named)
    sender.close()


def test_a_push_that_was_not_finished_makes_a_new_group(pair):
    named = weights(3)
    sender = Sender(lambda: iter(named), bucket_bytes=8192)
    push(sender, pair, 1, "broadcast", TWO)
    first = sender._broadcaster
    sender.begin(2, TWO)  # given up: a receiver may have missed something
    push(sender, pair, 2, "broadcast", TWO)
    assert sender._broadcaster is not first
    assert pair[0].call("finish", 2) == digests(named)
    sender.close()


def test_order_and_version_are_checked_before_anything_is_received(pair):
    named = weights(4)
    sender = Sender(lambda: iter(named), bucket_bytes=8192)
    sender.begin(5, TWO)
    pair[0].call("begin", 5)
    sender.pack_next()
    bucket = sender.packed("broadcast")
    with pytest.raises(WeightError, match="is of version 6"):
        pair[0].call("take", replace(bucket, version=6))
    with pytest.raises(WeightError, match="arrived where bucket 0 was due"):
        pair[0].call("take", replace(bucket, index=1))
    with pytest.raises(WeightError, match="broadcast 3 of weights is due, but this receiver had 0 as its last"):
        pair[0].call("take", replace(bucket, data=replace(bucket.data, sequence=3)))
    sender.close()


def test_a_receiver_that_never_comes_is_named_in_time(pair):
    sender = Sender(lambda: iter(weights(5)))
    broadcast_group = replace(TWO, timeout_s=3.0)
    sender.begin(1, broadcast_group)
    sender.pack_next()
    pair[0].call("begin", 1)
    pair[0].start("take", as_rank(sender.packed("broadcast"), 1))
    sender._broadcaster._store.wait(["1/joined"], datetime.timedelta(seconds=60))  # engine 0 has come
    started_s = time.monotonic()
    with pytest.raises(DeadlineError, match=r"to 2 processes failed after .*: engine 1 did not receive it"):
        sender.broadcast()
    assert time.monotonic() - started_s < 30  # 3 s of its own, and some; the default would be 120
    assert isinstance(pair[0].answer(), RunError)  # which did not wait for ever either


@pytest.mark.long
def test_a_receiver_that_dies_in_the_middle_is_named_and_the_others_go_on():
    named = weights(6, num=4, size=8 << 20)  # 32 MiB each: more than what connections buffer
    sender = Sender(lambda: iter(named), bucket_bytes=32 << 20)
    with engines(2) as (living, dying):
        push(sender, [living, dying], 1, "broadcast", TWO)
        sender.begin(2, TWO)
        living.call("begin", 2)
        sender.pack_next()
        living.start("take", as_rank(sender.packed("broadcast"), 1))
        dying.start("die", None)
        dying.process.join(30)
        started_s = time.monotonic()
        with pytest.raises(RunError, match="engine 1 did not receive it") as caught:
            sender.broadcast()
        assert "engine 0" not in str(caught.value)
        assert time.monotonic() - started_s < TWO.timeout_s
        failed = living.answer()
        # It may have had all of it by then; else it says so, and the loop looks for the dead.
        assert failed is None or (isinstance(failed, RunError) and failed.is_death)
        # Without the dead one, or with another in its place, a new group is made.
        with engines(1) as [replacement]:
            push(sender, [living, replacement], 2, "broadcast", replace(TWO, generation=1))
            assert [e.call("finish", 2) for e in (living, replacement)] == [digests(named)] * 2
    sender.close()


def test_a_bucket_that_is_iterated_again_gives_the_same():
    import threading

    sender = Sender(lambda: iter(weights(7)))
    alone = BroadcastGroup(("engine 0",), "gloo", timeout_s=30.0)
    sender.begin(1, alone)
    sender.pack_next()
    bucket = sender.packed("broadcast")
    sending = threading.Thread(target=sender.broadcast)  # one process may be both, as in the local runtime
    sending.start()
    first = digests(bucket)
    sending.join()
    assert first == digests(bucket) == digests(weights(7))
    assert isinstance(bucket.data, BroadcastData)
    sender.close()


def test_the_sender_listens_on_the_loopback_interface_alone():
    sender = Sender(lambda: iter(weights(8)))
    sender.begin(1, TWO)
    sender.pack_next()
    port = sender.packed("broadcast").data.port
    with open("/proc/net/tcp") as file:
        listening = [line.split()[1] for line in file if line.split()[3] == "0A"]
    assert f"0100007F:{port:04X}" in listening
    assert f"00000000:{port:04X}" not in listening
    sender.close()


def test_handles_of_several_ranks_are_merged():
    sender = Sender(lambda: iter(weights(9)))
    sender.begin(1)
    sender.pack_next()
    bucket = sender.packed()
    merged = merge([replace(bucket, data=SharedData(8, {uuid: uuid})) for uuid in ("a", "b")])
    assert merged.data == SharedData(8, {"a": "a", "b": "b"})
