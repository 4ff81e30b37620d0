"""Keys of channels that are used once: what is left of them, and that nothing is lost when their queues are freed."""

from __future__ import annotations

import asyncio
import enum
import os
import resource
import secrets
import subprocess
import sys
import threading
import uuid
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from fractions import Fraction
from pathlib import Path

import numpy
import pytest
from waiting import wait_until

from hotseat.errors import UserError
from hotseat.rlinf import broker
from hotseat.rlinf import channel as rlinf_channel
from hotseat.rlinf.broker import BrokerAddress
from hotseat.rlinf.broker_process import BrokerServer
from hotseat.rlinf.channel import Channel
from hotseat.rlinf.keys import key_text
from hotseat.rlinf.queues import QueueDirectory

MAX_IDLE = 4
NUM_KEYS = 100

Pair = namedtuple("Pair", "first second")


@pytest.fixture
def server(tmp_path):
    """A broker in a thread of this process, so that tests see what it keeps."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)  # which it raises
    made = BrokerServer(str(tmp_path / "socket"), None, secrets.token_bytes(32))
    is_ended, end = os.pipe()
    thread = threading.Thread(target=made.run, args=(is_ended,))
    thread.start()
    yield made
    broker.forget_clients(str(tmp_path / "socket"))
    os.close(end)
    thread.join(60)
    os.close(is_ended)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture(params=["inside", "outside"])
def directory(request, tmp_path, monkeypatch):
    monkeypatch.setattr(rlinf_channel, "MAX_IDLE", MAX_IDLE)
    if request.param == "inside":
        return QueueDirectory(None, 60.0)
    server = request.getfixturevalue("server")
    return QueueDirectory(BrokerAddress(str(tmp_path / "socket"), None, 0, server.key), 60.0)


def num_queues(directory: QueueDirectory, request) -> int:
    """Count the queues that there are, after everything that was asked of the broker before."""
    if directory._broker is None:
        return len(directory._local)
    directory.open("last", 1).size()  # answered after messages that were sent before
    return len(request.getfixturevalue("server")._queues)


@pytest.mark.parametrize("is_async", [False, True])
def test_keys_that_are_used_once_leave_nothing(directory, request, is_async):
    channel = Channel("requests", 0, directory)
    num_threads, num_clients = threading.active_count(), len(broker._used_clients)
    for key in range(NUM_KEYS):
        putting = channel.put(f"item {key}", key=key, async_op=is_async)
        taken = channel.get(key=key, async_op=is_async)
        assert (taken.wait() if is_async else taken) == f"item {key}"
        assert putting is None or putting.wait() is None
        assert channel.empty(key=key)
        with pytest.raises(asyncio.QueueEmpty):
            channel.get_nowait(key=key)
    assert num_queues(directory, request) <= MAX_IDLE + 2  # with those that are being left, and the one asked last
    assert len(channel._post._open) <= MAX_IDLE + 1
    assert len(broker._used_clients) <= num_clients + MAX_IDLE + 2
    wait_until(lambda: threading.active_count() <= num_threads + 2 * (MAX_IDLE + 1))


def test_what_waits_under_many_keys_is_there_when_it_is_asked_for(directory, request):
    channel = Channel("requests", 0, directory)
    for number in range(3):
        for key in range(NUM_KEYS):
            channel.put((key, number), key=key)
    assert num_queues(directory, request) >= NUM_KEYS
    for key in range(NUM_KEYS):
        assert [channel.get(key=key) for _ in range(3)] == [(key, number) for number in range(3)]
    assert num_queues(directory, request) <= MAX_IDLE + 2


def test_threads_that_share_keys_lose_nothing_and_keep_the_order(directory, request, monkeypatch):
    monkeypatch.setattr(rlinf_channel, "MAX_IDLE", 0)  # every queue is left as soon as nobody uses it
    channel = Channel("requests", 0, directory)
    keys, num_items = range(6), 60

    def produce(key: int) -> None:
        works = [channel.put(number, key=key, async_op=number % 3 == 0) for number in range(num_items)]
        for work in works:
            assert work is None or work.wait() is None

    def consume(key: int) -> list[int]:
        return [channel.get(key=key) for _ in range(num_items)]

    with ThreadPoolExecutor(2 * len(keys)) as threads:
        producing = [threads.submit(produce, key) for key in keys]
        for consuming in [threads.submit(consume, key) for key in keys]:
            assert consuming.result(60) == list(range(num_items))
        for each in producing:
            each.result(60)
    assert num_queues(directory, request) <= 2


def test_the_default_key_and_a_bounded_one_keep_their_bounds(directory):
    channel = Channel("requests", 1, directory)
    channel.put("first")
    channel.put("bounded", key="other")
    for key in range(3 * MAX_IDLE):
        channel.put(key, key=key)
        channel.get(key=key)
    assert f"requests:{rlinf_channel.DEFAULT_KEY!r}" in channel._post._open  # the end of this process fails it
    for key in (rlinf_channel.DEFAULT_KEY, "other"):
        with pytest.raises(asyncio.QueueFull):
            channel.put_nowait("second", key=key)
    assert (channel.get(), channel.get(key="other")) == ("first", "bounded")


def test_a_worker_that_closes_leaves_the_channels_of_all_nodes(server, tmp_path, monkeypatch):
    monkeypatch.setattr(rlinf_channel, "_posts", {})
    address = BrokerAddress(str(tmp_path / "socket"), None, 0, server.key)
    here, there = QueueDirectory(address, 60.0), QueueDirectory(address, 60.0)
    name = f"requests:{rlinf_channel.DEFAULT_KEY!r}"
    for directory in (here, there):
        Channel("requests", 0, directory).put("an item")
        assert directory.open(name, 1).link.facts()["producers"] != []
    rlinf_channel.leave_all()
    for directory in (here, there):
        assert directory.open(name, 1).link.facts() == {"size": 1, "producers": [], "consumers": []}


# --- their text -------------------------------------------------------------------------------------------------------


class Color(enum.Enum):
    RED = 1


class Size(enum.StrEnum):
    LARGE = "large"


@dataclass
class Request:
    number: int
    names: frozenset[str]
    note: object = field(default=None, compare=False)


class Plain:
    """Has neither a form of its own nor equality."""


def test_equal_keys_have_one_text_and_others_another():
    same = [
        [3, numpy.int64(3)],
        ["large", Size.LARGE],
        [1.5, numpy.float64(1.5), numpy.float32(1.5)],
        [True, numpy.bool_(True)],
        [{"a", "b"}, frozenset({"b", "a"})],
        [("a", 1), Pair("a", 1)],
        [Request(1, frozenset({"a"}), object()), Request(1, frozenset({"a"}))],
        [{"a": 1, "b": 2}, {"b": 2, "a": 1}],
        [uuid.UUID(int=5), uuid.UUID(int=5)],
    ]
    others = [
        None,
        False,
        "None",
        "3",
        b"3",
        ["a", 1],
        set(),
        {},
        Fraction(1, 3),
        Request(2, frozenset({"a"})),
        Color.RED,
        Path("3"),
        date(2020, 1, 2),
    ]
    texts = [{key_text(key) for key in keys} for keys in same]
    assert [len(each) for each in texts] == [1] * len(same)
    assert len(set().union(*texts, map(key_text, others))) == len(same) + len(others)


def test_a_key_has_the_same_text_in_a_process_with_other_hashes():
    key = ({"a", "b", "c", "d"}, {"x": 1, "y": (None, 2.5)}, uuid.UUID(int=5))
    code = f"from uuid import UUID; from hotseat.rlinf.keys import key_text; print(key_text({key!r}))"
    other = {**os.environ, "PYTHONHASHSEED": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=other, capture_output=True, text=True, check=True)
    assert run.stdout.rstrip() == key_text(key)


@pytest.mark.parametrize("key", [Plain(), (1, Plain()), numpy.zeros(2), numpy.longdouble(1), print])
def test_a_key_without_a_form_that_all_processes_share_is_refused(key):
    channel = Channel("requests", 0, QueueDirectory(None, 60.0))
    with pytest.raises(UserError, match="which has no form that is the same in all processes: use text"):
        channel.put("an item", key=key)
