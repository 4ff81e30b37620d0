"""Queues of channels: bounded; a failed user wakes every waiter with the reason."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from waiting import wait_until

from hotseat.errors import DeadlineError, WorkerError
from hotseat.rlinf import wire
from hotseat.rlinf.bounded_queue import BoundedQueue
from hotseat.rlinf.broker import Broker, BrokerClient
from hotseat.rlinf.queues import Queue, QueueDirectory
from hotseat.rlinf.wire import DONE, FAILED, ITEMS, MAX_PASSED, receive_with

PEER = Path(__file__).parents[1] / "helpers" / "queue_peer.py"


# --- the queue itself: no threads, no sockets -------------------------------------------------------------------------


class Answers(list):
    """Collects (name, kind, payload) in the order in which requests were answered."""

    def to(self, name):
        return lambda kind, payload: self.append((name, kind, payload))


def test_a_full_queue_holds_producers_back_in_their_order():
    queue, answers = BoundedQueue(2), Answers()
    for name in "abcd":
        queue.put(name, 1.0, answers.to(name))
    assert answers == [("a", DONE, None), ("b", DONE, None)]
    queue.get(0.0, answers.to("get"))
    assert answers[2:] == [("get", ITEMS, ["a"]), ("c", DONE, None)]
    queue.get(2.0, answers.to("get"))
    assert answers[4:] == [("get", ITEMS, ["b", "c"]), ("d", DONE, None)]


def test_a_get_waits_for_the_weight_that_it_asked_for():
    queue, answers = BoundedQueue(4), Answers()
    queue.get(3.0, answers.to("get"))
    for item in (1, 2):
        queue.put(item, 1.0, answers.to("put"))
    assert answers == [("put", DONE, None)] * 2
    queue.put(3, 1.0, answers.to("put"))
    queue.put(4, 1.0, answers.to("put"))
    assert answers[2:] == [("put", DONE, None), ("get", ITEMS, [1, 2, 3]), ("put", DONE, None)]
    assert list(queue.items) == [(4, 1.0)]


def test_a_put_that_has_no_room_and_a_get_that_wants_more_do_not_wait_for_each_other():
    queue, answers = BoundedQueue(2), Answers()
    for item in (1, 2, 3):
        queue.put(item, 1.0, answers.to("put"))
    assert answers == [("put", DONE, None)] * 2
    queue.get(3.0, answers.to("get"))
    assert answers[2:] == [("put", DONE, None), ("get", ITEMS, [1, 2, 3])]


def test_a_withdrawn_request_leaves_the_way_free():
    queue, answers = BoundedQueue(2), Answers()
    many = answers.to("many")
    queue.get(2.0, many)
    queue.get(0.0, answers.to("one"))
    queue.put("x", 1.0, answers.to("put"))
    assert answers == [("put", DONE, None)]
    assert queue.cancel(many)
    assert answers[1:] == [("one", ITEMS, ["x"])]
    assert not queue.cancel(many)


def test_a_failure_wakes_everybody_with_the_first_reason():
    queue, answers = BoundedQueue(1), Answers()
    queue.get(0.0, answers.to("a"))
    queue.get(0.0, answers.to("b"))
    queue.fail("disk on fire")
    queue.fail("second thoughts")
    queue.put(1, 0.0, answers.to("c"))
    assert answers == [(name, FAILED, "disk on fire") for name in "abc"]


# --- within a process and through a broker: the same behaviour --------------------------------------------------------


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    made = Broker(str(tmp_path_factory.mktemp("b")))
    yield made
    made.close()


@pytest.fixture(params=["inside", "outside"])
def make(request):
    def channel(capacity: int) -> Queue:
        address = request.getfixturevalue("broker").address if request.param == "outside" else None
        return QueueDirectory(address, 600.0).open("numbers", capacity)

    return channel


def in_thread(call, *args, **kwargs):
    """Run it elsewhere; the returned function waits for its result or raises its error."""
    outcome: list = []

    def run() -> None:
        try:
            outcome.append((call(*args, **kwargs), None))
        except Exception as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result():
        thread.join(300)
        value, error = outcome[0]
        if error:
            raise error
        return value

    return result


def take(channel: Queue, count: int, timeout_s: float = 300) -> list:
    return [channel.get(timeout_s=timeout_s) for _ in range(count)]


def test_items_arrive_in_order(make):
    channel = make(3)
    consumed = in_thread(take, channel, 50)
    for value in range(50):
        channel.put(value)
    assert consumed() == list(range(50))


def test_a_full_channel_holds_the_producer_back(make):
    channel = make(2)
    channel.put(1)
    channel.put(2)
    waiting = in_thread(channel.put, 3)
    time.sleep(0.1)
    assert channel.size() == 2
    assert channel.get() == 1
    waiting()
    assert take(channel, 2) == [2, 3]


def test_a_batch_has_the_weight_that_was_asked_for(make):
    channel = make(8)
    for weight in (2, 1, 3, 5):
        channel.put(weight, weight=weight)
    assert channel.get_weight(5) == [2, 1]
    assert channel.get_weight(3) == [3]
    assert channel.get_weight(1) == [5]  # too heavy by itself
    with pytest.raises(DeadlineError, match=r"waited 0\.1 s for items of weight 2; it has 0 of 8"):
        channel.get_weight(2, timeout_s=0.1)
    with pytest.raises(ValueError, match="a batch of weight 0; it must be above 0"):
        channel.get_weight(0)


def test_waits_that_run_out_say_what_for(make):
    channel = make(1)
    with pytest.raises(DeadlineError, match=r"channel 'numbers': waited 0\.1 s for an item; it has 0 of 1"):
        channel.get(timeout_s=0.1)
    channel.put(1)
    with pytest.raises(DeadlineError, match=r"waited 0\.1 s to put an item; it has 1 of 1"):
        channel.put(2, timeout_s=0.1)
    assert channel.get() == 1
    assert channel.size() == 0  # the item that came too late is not in it


def test_requests_that_can_never_be_met_are_refused(make):
    with pytest.raises(ValueError, match="must be at least 1"):
        make(0)
    with pytest.raises(ValueError, match="timeout_s is inf; every wait has a deadline"):
        make(1).get(timeout_s=math.inf)


def test_many_threads_lose_and_double_nothing(make):
    channel = make(7)

    def produce(first: int) -> None:
        for value in range(first, first + 100):
            channel.put(value)

    producers = [in_thread(produce, 100 * index) for index in range(3)]
    consumers = [in_thread(take, channel, 100) for _ in range(3)]
    for wait in producers:
        wait()
    taken = [wait() for wait in consumers]
    assert sorted(value for values in taken for value in values) == list(range(300))


def test_a_channel_inside_a_process_does_not_leave_it():
    with pytest.raises(TypeError, match="stays in its process"):
        pickle.dumps(QueueDirectory(None, 60.0))


# --- between processes ------------------------------------------------------------------------------------------------


@dataclass
class Big:
    data: bytes


def outside(broker: Broker, capacity: int = 8) -> Queue:
    return QueueDirectory(broker.address, 600.0).open("numbers", capacity)


def linked(address, token: str, capacity: int = 4) -> Queue:
    """Return the queue of this token, in a process that reaches the broker by this address."""
    return Queue("numbers", capacity, BrokerClient(address, f"numbers/{token}", capacity))


@pytest.fixture
def peer(tmp_path):
    started = []

    def start(what: str, channel: Queue) -> subprocess.Popen:
        path = tmp_path / f"channel-{len(started)}"
        path.write_bytes(pickle.dumps(channel))
        process = subprocess.Popen([sys.executable, str(PEER), what, str(path)], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait(60)
        process.stdout.close()


def test_items_cross_processes(broker, peer):
    channel = outside(broker)
    other = peer("consume", channel)
    for value in range(300):
        channel.put(value, timeout_s=300)
    channel.put(None, timeout_s=300)
    assert other.communicate(timeout=300)[0] == "300\n"


def test_a_killed_producer_wakes_the_consumer(broker, peer):
    channel = outside(broker)
    other = peer("put one and wait", channel)
    assert other.stdout.readline() == "put\n"
    assert channel.get(timeout_s=300) == 1
    waiting = in_thread(channel.get, timeout_s=3000)
    time.sleep(0.1)
    begin = time.monotonic()
    other.kill()
    with pytest.raises(WorkerError, match=rf"its producer driver \(pid {other.pid}\) went away without closing it"):
        waiting()
    assert time.monotonic() - begin < 300  # it would wait 3,000


def test_a_killed_consumer_wakes_the_producer(broker, peer):
    channel = outside(broker, capacity=1)
    other = peer("take one and wait", channel)
    channel.put(1, timeout_s=300)
    assert other.stdout.readline() == "1\n"
    channel.put(2, timeout_s=300)
    waiting = in_thread(channel.put, 3, timeout_s=3000)
    time.sleep(0.1)
    begin = time.monotonic()
    other.kill()
    with pytest.raises(WorkerError, match=rf"its consumer driver \(pid {other.pid}\) went away"):
        waiting()
    assert time.monotonic() - begin < 300  # it would wait 3,000


def test_a_producer_may_go_once_it_has_left(broker, peer):
    channel = outside(broker)
    other = peer("put one, leave and wait", channel)
    assert other.stdout.readline() == "put\n"
    other.kill()
    other.wait(60)
    time.sleep(0.1)
    channel.put(2)
    assert take(channel, 2) == [1, 2]


@pytest.mark.slow
def test_a_stopped_process_is_named_at_the_deadline(broker, peer):
    channel = outside(broker)
    other = peer("put one and wait", channel)
    assert other.stdout.readline() == "put\n"
    channel.get(timeout_s=60)
    os.kill(other.pid, signal.SIGSTOP)
    with pytest.raises(DeadlineError, match=rf"producers driver \(pid {other.pid}\)"):
        channel.get(timeout_s=0.3)


@pytest.mark.slow
def test_a_killed_broker_wakes_both_ends(tmp_path, peer):
    broker = Broker(str(tmp_path))
    channel = outside(broker)
    other = peer("wait", channel)
    waiting = in_thread(channel.get, timeout_s=300)
    time.sleep(0.3)
    os.kill(broker.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="the broker of channel 'numbers' is gone"):
        waiting()
    assert "WorkerError: the broker of channel 'numbers' is gone" in other.communicate(timeout=300)[0]
    broker.close()


def test_large_items_cross_too(broker):
    channel = outside(broker, capacity=2)
    waiting = in_thread(channel.get, timeout_s=300)
    channel.put(Big(os.urandom(1 << 10) * (30 << 10)), timeout_s=300)
    assert len(waiting().data) == 30 << 20


def memory_of(pid: int | str) -> int:
    """Return how many descriptors of items in memory a process has."""
    links = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own
            links.append(os.readlink(path))
    return sum("hotseat-item" in link for link in links)


def test_large_items_wait_in_memory_of_their_own_and_leave_none(broker):
    channel = outside(broker, capacity=200)
    items = [Big(bytes([number]) * (1 << 18)) for number in range(70)]  # more than one message passes
    channel.put(Big(b"small"))
    for item in items:
        channel.put(item, weight=1)
    assert memory_of(broker.pid) == 70
    assert memory_of("self") == 0
    assert channel.get().data == b"small"
    assert channel.get_weight(70) == items
    assert memory_of("self") == 0
    wait_until(lambda: memory_of(broker.pid) == 0)  # it lets go of them after they are here


def test_what_waited_for_room_is_not_kept_until_its_deadline(broker):
    channel = outside(broker, capacity=1)
    item = Big(bytes(1 << 18))
    channel.put(item)
    waiting = in_thread(channel.put, item, timeout_s=3000)
    wait_until(lambda: memory_of(broker.pid) == 2)
    assert channel.get() == item
    waiting()
    assert channel.get() == item
    wait_until(lambda: memory_of(broker.pid) == 0)


def test_what_a_process_waited_to_put_is_not_kept_after_its_death(broker, peer):
    channel = outside(broker, capacity=1)
    channel.put(1)
    other = peer("put large and wait", channel)  # which has no room
    wait_until(lambda: memory_of(broker.pid) == 1)
    other.kill()
    wait_until(lambda: memory_of(broker.pid) == 0)
    with pytest.raises(WorkerError, match="went away without closing it"):
        fill(channel)


def test_descriptors_that_do_not_fit_are_an_error_and_none_stays_open():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(ours, [b"x"], [0] * (MAX_PASSED + 1))
        with pytest.raises(OSError, match="too many open files"):
            receive_with(theirs, 1)
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("what", ["put large and wait", "take one and wait"])
def test_a_killed_process_leaves_no_memory(broker, peer, what):
    channel = outside(broker)
    other = peer(what, channel)
    if what.startswith("put"):
        assert other.stdout.readline() == "put\n"
        assert memory_of(broker.pid) == 1
    else:
        channel.put(1, timeout_s=300)
        assert other.stdout.readline() == "1\n"
        channel.put(b"x" * (1 << 20), timeout_s=300)
        assert memory_of(broker.pid) == 1
    other.kill()
    with pytest.raises(WorkerError, match="went away without closing it"):
        fill(channel)
    wait_until(lambda: memory_of(broker.pid) == 0)  # what nobody can take any more is dropped


def fill(channel: Queue) -> None:
    while True:
        channel.put(1, timeout_s=300)


def test_a_large_item_of_this_machine_reaches_another(tmp_path):
    broker = Broker(str(tmp_path), host="127.0.0.1")
    elsewhere = replace(broker.address, path=f"{broker.address.path}-of-another-machine")
    here, there = linked(broker.address, "one"), linked(elsewhere, "one")
    item = Big(os.urandom(1 << 19))
    here.put(item)
    assert memory_of(broker.pid) == 1
    assert there.get() == item
    there.put(item)
    assert here.get() == item
    assert memory_of(broker.pid) == 0
    broker.close()
    there.leave()


def test_a_fork_has_connections_of_its_own(broker):
    channel = outside(broker)
    channel.put(1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if channel.get(timeout_s=60) == 1 else 2
            channel.put(5, timeout_s=60)
            channel.get(timeout_s=60)
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_strangers_are_turned_away(broker):
    path, host = broker.address.path, broker.address.host
    assert host is None  # no port is open
    assert os.stat(os.path.dirname(path)).st_mode & 0o077 == 0
    with pytest.raises(WorkerError, match="is gone"):
        linked(replace(broker.address, key=b"wrong key"), "one").put(1, timeout_s=60)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(60)
        stranger.connect(path)
        assert len(stranger.recv(64)) == 32
        stranger.sendall(b"x" * 64)
        assert stranger.recv(64) == b""
    assert outside(broker).size() == 0  # and the broker goes on


def greeted(broker: Broker, **hello) -> socket.socket:
    """Connect with the key; greet, too, with what a greeting has otherwise."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(300)
    connection.connect(broker.address.path)
    nonce = received(connection, wire.NONCE)
    connection.sendall(wire.proof(broker.address.key, nonce, b"client") + bytes(wire.NONCE))
    received(connection, wire.NONCE)
    whole = {"who": "a stranger", "channel": "strange/1", "capacity": 4}
    connection.sendall(message(wire.HELLO, json.dumps({**whole, **hello}).encode()))
    return connection


def received(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        data += connection.recv(num_bytes - len(data))
    return data


def message(kind: int, payload: bytes) -> bytes:
    return wire.HEAD.pack(kind, len(payload)) + payload


def asked(kind: int, rest: bytes = b"", timeout_s: float = 1.0, weight: float = 0.0) -> bytes:
    return message(kind, wire.ASK.pack(timeout_s, weight) + rest)


def item(data: bytes) -> bytes:
    return wire.LENGTH.pack(len(data)) + data


MALFORMED = {
    "no greeting's JSON": message(wire.HELLO, b"{"),
    "deep JSON": message(wire.HELLO, b"[" * 60_000),
    "a second greeting": message(wire.HELLO, json.dumps({"who": "", "channel": "", "capacity": 1}).encode()),
    "unknown kind": message(200, b""),
    "short put": message(wire.PUT, b"x"),
    "no item": asked(wire.PUT),
    "two items": asked(wire.PUT, item(b"x") + item(b"y")),
    "an item longer than the message": asked(wire.PUT, wire.LENGTH.pack(1000) + b"x"),
    "more than its item": asked(wire.PUT, item(b"x") + b"yz"),
    "memory that was not passed": asked(wire.PUT, wire.LENGTH.pack(8 | wire.IN_MEMORY)),
    "a token that was not passed": asked(wire.PUT, wire.LENGTH.pack(1 | wire.KEPT) + b"x"),
    "no time": asked(wire.PUT, item(b"x"), timeout_s=math.nan),
    "endless time": asked(wire.PUT, item(b"x"), timeout_s=math.inf),
    "no weight": asked(wire.PUT, item(b"x"), weight=math.nan),
    "long get": asked(wire.GET, b"x"),
    "a get with an item": asked(wire.GET, item(b"x")),
    "two gets at once": 2 * asked(wire.GET, timeout_s=3600.0),
    "short record": message(wire.RECORD, b"x"),
    "a record without a value": asked(wire.RECORD, item(b"name")),
    "a name that is no text": asked(wire.LOOK_UP, item(b"\xff")),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_message_ends_its_connection_alone(broker, name):
    bystander = outside(broker)
    bystander.put(1)
    with greeted(broker) as connection:
        connection.sendall(MALFORMED[name])
        while connection.recv(4096):  # the answer to the greeting, and then the end
            pass
    bystander.put(2)
    assert take(bystander, 2) == [1, 2]


@pytest.mark.parametrize("hello", [{"capacity": "4"}, {"capacity": 0}, {"who": 5}, {"channel": "\ud800"}])
def test_a_malformed_greeting_ends_its_connection_alone(broker, hello):
    with greeted(broker, **hello) as connection:
        assert connection.recv(4096) == b""
    assert outside(broker).size() == 0


@pytest.mark.parametrize("is_token", [False, True])
def test_descriptors_that_are_something_else_end_the_connection_alone(broker, is_token):
    """Here of a pipe, where memory or a socket is to be."""
    length = wire.LENGTH.pack(1 | wire.KEPT) + b"x" if is_token else wire.LENGTH.pack(1 << 20 | wire.IN_MEMORY)
    reading, writing = os.pipe()
    with greeted(broker) as connection:
        socket.send_fds(connection, [asked(wire.PUT, length)], [reading])
        while connection.recv(4096):
            pass
    os.close(reading)
    with pytest.raises(BrokenPipeError):  # the broker has closed its copy, too
        os.write(writing, b"x")
    os.close(writing)
    assert outside(broker).size() == 0


def test_the_channel_of_a_malformed_message_fails_with_the_reason(broker):
    channel = linked(broker.address, "broken")
    with greeted(broker, channel="numbers/broken") as connection:
        connection.sendall(asked(wire.PUT, item(b"x")) + message(200, b""))
        while connection.recv(4096):
            pass
    with pytest.raises(
        WorkerError, match=r"its producer a stranger sent a message that makes no sense \(ValueError: kind"
    ):
        channel.get(timeout_s=300)


def test_memory_that_its_producer_shortens_fails_the_channel_and_not_the_broker(tmp_path):
    broker = Broker(str(tmp_path), host="127.0.0.1")
    elsewhere = replace(broker.address, path=f"{broker.address.path}-of-another-machine")
    memory = wire.Memory.of(b"x" * 4096)
    with greeted(broker, channel="numbers/short") as connection:
        passing = asked(wire.PUT, wire.LENGTH.pack(4096 | wire.IN_MEMORY))
        socket.send_fds(connection, [passing], [memory.descriptor])
        for _ in range(2):
            assert wire.HEAD.unpack(received(connection, wire.HEAD.size)) == (wire.DONE, 0)
        os.ftruncate(memory.descriptor, 10)
        far = linked(elsewhere, "short")
        with pytest.raises(WorkerError, match="an item of it cannot be read .* memory of 4096 bytes ends after 10"):
            far.get(timeout_s=300)
    assert outside(broker).size() == 0
    broker.close()


@pytest.mark.parametrize("is_disk_shared", [False, True])
def test_over_tcp_as_between_machines(tmp_path, is_disk_shared):
    broker = Broker(str(tmp_path), host="127.0.0.1")
    elsewhere = replace(broker.address, path=f"{broker.address.path}-of-another-machine")
    if is_disk_shared:
        Path(elsewhere.path).touch()  # a file on which nobody here listens
    channel = linked(elsewhere, "far")
    large = os.urandom(1 << 20)
    for value in (1, 2, large):
        channel.put(value, weight=1)
    assert channel.get_weight(3) == [1, 2, large]
    broker.close()


def test_a_broker_that_is_stuck_is_named(tmp_path, monkeypatch):
    broker = Broker(str(tmp_path))
    channel = outside(broker)
    assert channel.size() == 0
    monkeypatch.setattr("hotseat.rlinf.broker._BROKER_GRACE_S", 0.1)
    os.kill(broker.pid, signal.SIGSTOP)
    with pytest.raises(DeadlineError, match=r"the broker of channel 'numbers': no answer in 0\.2 s"):
        channel.get(timeout_s=0.1)
    os.kill(broker.pid, signal.SIGCONT)
    broker.close()


def test_connections_end_with_their_broker(tmp_path):
    """Also one that a dead broker did not accept: nothing is left for the garbage collector to complain about."""
    broker = Broker(str(tmp_path))
    channel = outside(broker)
    before = sockets()
    channel.put(1)
    assert len(sockets() - before) == 1  # those of earlier tests may end at any time
    broker.close()
    assert not sockets() - before
    Path(broker.address.path).touch()
    with pytest.raises(WorkerError, match="the broker of channel 'numbers' is gone"):
        channel.put(2)
    assert not sockets() - before


def sockets() -> set[str]:
    """The sockets that this process has open."""
    opened = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the folder itself, which is closed by now
            opened.add(os.readlink(f"/proc/self/fd/{name}"))
    return {link for link in opened if link.startswith("socket:")}
