"""Tensors on devices inside items of channels: values, lifetime, deaths, and the way through host memory.

The device's memory are files here (`file_devices.py`); `test_device_items_gpu.py` has a real one.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
from collections import namedtuple
from dataclasses import dataclass, replace
from pathlib import Path

import preloaded
import pytest
import torch
from file_devices import FileDevices
from queue_tools import fail, queue_of
from waiting import wait_until

from hotseat.errors import DeadlineError, WorkerError
from hotseat.rlinf import device_items
from hotseat.rlinf.broker import Broker, BrokerClient
from hotseat.rlinf.channel import Channel
from hotseat.rlinf.queues import Queue, QueueDirectory

PEER = Path(__file__).parents[2] / "helpers" / "device_peer.py"

Pair = namedtuple("Pair", "first second")


@dataclass
class Batch:
    observations: torch.Tensor
    info: dict


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    made = Broker(str(tmp_path_factory.mktemp("b")), host="127.0.0.1")
    yield made
    made.close()


@pytest.fixture
def devices(tmp_path, monkeypatch):
    folder = tmp_path / "device"
    folder.mkdir()
    made = FileDevices(folder)
    monkeypatch.setattr(device_items.pickling, "MIN_ON_DEVICE", 0)
    device_items.use(made)
    yield made
    device_items.use(None)


@pytest.fixture
def channel(broker):
    made = queue_of(broker, "tensors", 200)
    yield made
    fail(made)
    wait_until(lambda: device_items.num_kept() == 0)


class Peer:
    def __init__(self, channel: Queue, folder: Path, file: Path, uuid: str):
        file.write_bytes(pickle.dumps(channel))
        orders = file.with_suffix(".orders")
        os.mkfifo(orders)
        self.orders = os.open(orders, os.O_RDWR)  # which does not wait for the other end
        argv = [sys.executable, str(PEER), str(folder), uuid, str(file), str(orders)]
        self.process = preloaded.popen(argv, stdout=subprocess.PIPE, text=True)
        assert self.hear() == "ready"

    def ask(self, order: str) -> str:
        self.tell(order)
        return self.hear()

    def tell(self, order: str) -> None:
        os.write(self.orders, f"{order}\n".encode())

    def hear(self) -> str:
        return self.process.stdout.readline().rstrip("\n")

    def end(self) -> None:
        self.process.kill()
        self.process.wait(60)
        self.process.stdout.close()
        self.dismiss()

    def dismiss(self) -> None:
        if self.orders >= 0:
            os.close(self.orders)
            self.orders = -1


@pytest.fixture
def peer(channel, devices, tmp_path):
    started = []

    def start(uuid: str = "one") -> Peer:
        started.append(Peer(channel, devices.folder, tmp_path / f"channel-{len(started)}", uuid))
        return started[-1]

    yield start
    for process in started:
        process.end()


def far(broker: Broker, channel: Queue) -> Queue:
    """The same channel in a process on another machine."""
    elsewhere = replace(broker.address, path=f"{broker.address.path}-of-another-machine")
    return Queue("tensors", 200, BrokerClient(elsewhere, channel.link.channel, 200))


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def in_use(devices: FileDevices) -> int:
    return len(list(devices.folder.iterdir()))


# --- what arrives -----------------------------------------------------------------------------------------------------


def shared_item() -> dict:
    twice = numbers(5, 3)
    return {
        "nested": [(numbers(2, 2), {"deep": Batch(numbers(7), {"reward": numbers()})})],
        "pair": Pair(numbers(1), numbers(0, 4)),
        "twice": [twice, twice],
        "row": numbers(100, 4)[3],
        "turned": numbers(3, 5).t(),
        "strided": numbers(6, 6)[::2, ::3],
        "expanded": numbers(1, 4).expand(3, 4),
        "learned": torch.nn.Parameter(numbers(3)),
        "grad": numbers(3).requires_grad_(),
        "result": torch.nn.Parameter(numbers(3)) * 2,
        "on the CPU": torch.arange(6).reshape(2, 3),
        "text": "text",
        "large": b"x" * (1 << 19),
    }


def assert_same(arrived: dict, sent: dict) -> None:
    def tensors(item: dict) -> list[torch.Tensor]:
        deep = item["nested"][0][1]["deep"]
        named = [item[name] for name in ("row", "turned", "strided", "expanded", "learned", "grad", "on the CPU")]
        return [item["nested"][0][0], deep.observations, deep.info["reward"], *item["pair"], *item["twice"], *named]

    for mine, other in zip(tensors(arrived), tensors(sent), strict=True):
        assert torch.equal(mine, other)
        assert (mine.shape, mine.dtype, mine.requires_grad) == (other.shape, other.dtype, other.requires_grad)
        assert mine.data_ptr() != other.data_ptr() or not mine.numel()
    assert type(arrived["nested"][0][1]["deep"]) is Batch
    assert type(arrived["pair"]) is Pair
    assert arrived["twice"][0] is arrived["twice"][1]
    assert arrived["row"].untyped_storage().nbytes() == 32  # not the matrix that it is a row of
    assert arrived["turned"].stride() == sent["turned"].stride()
    assert arrived["strided"].is_contiguous()
    assert type(arrived["learned"]) is torch.nn.Parameter
    assert torch.equal(arrived["result"], sent["result"])
    assert arrived["result"].requires_grad
    assert (arrived["text"], arrived["large"]) == (sent["text"], sent["large"])


@pytest.mark.parametrize("way", ["device", "small", "no room", "no export", "too much", "too many"])
def test_tensors_anywhere_in_an_item_arrive(devices, channel, monkeypatch, way):
    if way == "small":
        monkeypatch.setattr(device_items.pickling, "MIN_ON_DEVICE", 1 << 20)
    elif way == "too much":
        devices.limit = 100
    elif way == "too many":
        monkeypatch.setattr(device_items.keeper, "MAX_KEPT", 0)
    devices.has_room, devices.can_export = way != "no room", way != "no export"
    item = shared_item()
    channel.put(item)
    assert device_items.num_kept() == (way == "device")
    assert in_use(devices) == (way == "device")
    assert_same(channel.get(), item)
    wait_until(lambda: in_use(devices) == device_items.num_kept() == 0)


def test_an_item_without_tensors_on_the_device_travels_as_ever(devices, channel):
    for item in (torch.ones(3), {"a": 1}, b"x" * (1 << 20)):
        channel.put(item, weight=1)
    tensor, small, large = channel.get_weight(3)
    assert torch.equal(tensor, torch.ones(3))
    assert (small, len(large)) == ({"a": 1}, 1 << 20)
    assert device_items.num_kept() == 0


class Marked(torch.Tensor):
    """A class of tensors, which torch pickles down to the storage."""


def test_other_kinds_of_tensors_arrive_by_their_storage(devices, channel):
    marked = torch.arange(6.0).reshape(2, 3).as_subclass(Marked)
    noted = numbers(4)
    noted.note = "a note"
    sparse = numbers(3, 3).to_sparse()
    storage = torch.arange(4, dtype=torch.int32).untyped_storage()
    devices.storages |= {marked.untyped_storage().data_ptr(), noted.untyped_storage().data_ptr(), storage.data_ptr()}
    channel.put([marked, noted, sparse, storage])
    assert device_items.num_kept() == 1
    mark, note, thin, stored = channel.get()
    assert type(mark) is Marked
    assert torch.equal(mark, marked)
    assert note.note == "a note"
    assert torch.equal(note, noted)
    assert torch.equal(thin.to_dense(), sparse.to_dense())
    assert bytes(stored) == bytes(storage)


def test_an_item_is_what_it_was_when_it_was_put(devices, channel):
    tensor = torch.ones(8, dtype=torch.float64)
    channel.put(tensor)
    tensor.zero_()
    assert channel.get().sum() == 8


@pytest.mark.slow
def test_another_process_on_the_device_maps_the_memory_and_lets_go_of_it(devices, channel, peer):
    other = peer()
    channel.put({"tensor": numbers(2, 2).fill_(3)})  # whose only reference is gone
    assert in_use(devices) == 1
    assert other.ask("get") == "torch.float64 (2, 2) 12.0 mapped 1"
    wait_until(lambda: in_use(devices) == device_items.num_kept() == 0)
    assert other.ask("put 5") == "put"
    assert channel.get()["tensor"].sum() == 60
    wait_until(lambda: in_use(devices) == 0)


@pytest.mark.slow
def test_a_process_on_another_device_gets_them_through_host_memory(devices, channel, peer):
    other = peer("two")
    channel.put({"tensor": numbers(2, 2).fill_(3)})
    assert other.ask("get") == "torch.float64 (2, 2) 12.0 mapped 0"
    wait_until(lambda: in_use(devices) == device_items.num_kept() == 0)


def test_a_process_on_another_machine_gets_them_by_way_of_the_broker(devices, channel, broker):
    there = far(broker, channel)
    item = shared_item()
    for each in (item, "between", item):
        channel.put(each, weight=1)
    first, between, last = there.get_weight(3)
    assert_same(first, item)
    assert_same(last, item)
    assert between == "between"
    wait_until(lambda: in_use(devices) == device_items.num_kept() == 0)
    there.put(item)  # and has no descriptors to pass
    assert device_items.num_kept() == 0
    assert_same(channel.get(), item)
    there.leave()


def test_more_items_than_one_message_passes_tokens_of(devices, channel):
    for number in range(100):
        channel.put(numbers(4).fill_(number), weight=1)
    assert device_items.num_kept() == 100
    assert [tensor[0].item() for tensor in channel.get_weight(100)] == list(range(100))
    wait_until(lambda: in_use(devices) == device_items.num_kept() == 0)


@pytest.mark.parametrize("is_async", [False, True])
def test_channels_of_rlinf_carry_them_too(devices, broker, is_async):
    directory = QueueDirectory(broker.address, 60.0)
    channel = Channel("with keys", 0, directory)
    item = shared_item()
    putting = [channel.put(item, weight=1, key=key, async_op=is_async) for key in ("a", "a", "b")]
    for work in putting if is_async else ():
        work.wait()
    assert device_items.num_kept() == 3
    for arrived in channel.get_batch(2, key="a"):
        assert_same(arrived, item)
    last = channel.get(key="b", async_op=is_async)
    assert_same(last.wait() if is_async else last, item)
    wait_until(lambda: in_use(devices) == device_items.num_kept() == 0)


@pytest.mark.slow
def test_tensors_in_an_object_of_the_script_itself_arrive(devices, channel, monkeypatch):
    import ray.cloudpickle

    class OfScript:
        def __init__(self, tensor):
            self.tensor, self.other = tensor, torch.arange(3)

    monkeypatch.setattr(OfScript, "__module__", "__main__")
    sent = numbers(4)
    channel.put(OfScript(sent))
    assert device_items.num_kept() == 1
    arrived = channel.get()
    assert torch.equal(arrived.tensor, sent)
    assert torch.equal(arrived.other, torch.arange(3))
    assert torch.Tensor not in ray.cloudpickle.CloudPickler.dispatch_table


def test_items_of_empty_tensors_arrive(devices, channel):
    channel.put(numbers(0, 3))
    assert channel.get().shape == (0, 3)


# --- what nobody takes ------------------------------------------------------------------------------------------------


def test_memory_is_freed_when_the_channel_fails(devices, channel):
    channel.put(numbers(4))
    assert in_use(devices) == 1
    fail(channel)
    wait_until(lambda: in_use(devices) == device_items.num_kept() == 0)


def test_memory_is_freed_when_there_was_no_room(devices, broker):
    channel = queue_of(broker, "one", 1)
    channel.put(1)
    with pytest.raises(DeadlineError):
        channel.put(numbers(4), timeout_s=0.1)
    wait_until(lambda: in_use(devices) == device_items.num_kept() == 0)


def test_memory_is_freed_when_the_broker_dies(devices, tmp_path):
    broker = Broker(str(tmp_path))
    queue_of(broker, "short", 4).put(numbers(4))
    assert in_use(devices) == 1
    os.kill(broker.pid, signal.SIGKILL)
    wait_until(lambda: in_use(devices) == device_items.num_kept() == 0)
    broker.close()


def test_memory_is_freed_when_an_item_cannot_be_unpickled(devices, channel):
    channel.put([numbers(4), Unloadable()], weight=1)
    channel.put(numbers(4), weight=1)
    with pytest.raises(ValueError, match="not today") as raised:
        channel.get_weight(2)
    wait_until(lambda: in_use(devices) == device_items.num_kept() == 0)
    del raised  # which kept the frames


def test_memory_is_freed_when_an_item_cannot_be_put(devices, channel, monkeypatch):
    with pytest.raises(ValueError, match="nor now") as raised:
        channel.put([numbers(4), Unpicklable()])
    wait_until(lambda: in_use(devices) == device_items.num_kept() == 0)
    monkeypatch.setattr("socket.socketpair", lambda family: 1 / 0)
    with pytest.raises(ZeroDivisionError) as raised:
        channel.put(numbers(4))
    assert in_use(devices) == device_items.num_kept() == 0
    del raised


class Unloadable:
    def __reduce__(self):
        return refuse, ()


class Unpicklable:
    def __reduce__(self):
        raise ValueError("nor now")


def refuse():
    raise ValueError("not today")


# --- deaths -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_is_freed_when_the_receiver_is_killed_during_its_copy(devices, channel, peer):
    other = peer()
    channel.put({"tensor": numbers(4)})
    assert other.ask("get and hang in the copy") == "copies"
    assert in_use(devices) == device_items.num_kept() == 1
    other.end()
    wait_until(lambda: in_use(devices) == device_items.num_kept() == 0)


@pytest.fixture
def sender(peer):
    """Return a process that has put an item, and left the channel, which its death would fail otherwise."""
    other = peer()
    assert other.ask("put 1") == "put"
    assert other.ask("hang up") == "None"
    return other


@pytest.mark.slow
@pytest.mark.parametrize("where", ["here", "far"])
def test_a_sender_that_was_killed_is_named(devices, channel, sender, broker, where):
    sender.end()
    taking = far(broker, channel) if where == "far" else channel
    what = "ended before" if where == "here" else "did not send"
    with pytest.raises(WorkerError, match=rf"driver \(pid {sender.process.pid}\) {what} the tensors of its item"):
        taking.get(timeout_s=60)


@pytest.mark.slow
def test_a_sender_that_is_killed_during_the_copy_is_named(devices, channel, sender):
    devices.at_map = sender.end
    with pytest.raises(WorkerError, match=rf"\(pid {sender.process.pid}\) ended before the tensors of its item"):
        channel.get(timeout_s=60)


@pytest.mark.slow
def test_a_childs_copies_of_tokens_do_not_hide_the_senders_death(devices, channel, peer):
    other = peer()
    assert other.ask("put 1") == "put"
    child = int(other.ask("fork"))
    try:
        assert other.ask("hang up") == "None"
        other.end()
        with pytest.raises(WorkerError, match="ended before the tensors of its item"):
            channel.get(timeout_s=60)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["leave", "exit"])
def test_what_a_sender_put_outlasts_it_if_it_ends_in_good_order(devices, channel, peer, ending):
    other = peer()
    assert other.ask("put 2") == "put"
    if ending == "leave":
        assert other.ask("leave") == "None"
        assert other.ask("num kept") == "0"
        other.end()
    else:
        assert other.ask("hang up") == "None"
        other.dismiss()
        assert other.process.wait(60) == 0
    assert in_use(devices) == 0
    assert channel.get(timeout_s=60)["tensor"].sum() == 24
    assert devices.num_mapped == 0


@pytest.mark.slow
def test_memory_that_the_sender_gave_up_during_the_copy_is_read_from_the_host(devices, channel, peer):
    other = peer()
    assert other.ask("put 2") == "put"
    devices.at_map = lambda: other.ask("leave")
    assert channel.get(timeout_s=60)["tensor"].sum() == 24
    assert devices.num_mapped == 1


def test_an_item_is_unpickled_once_with_tensors_that_are_right(devices, channel, monkeypatch):
    channel.put([numbers(3).fill_(5), Noted()])
    news = iter([False, True])  # the sender gives its memory up during the copy
    monkeypatch.setattr(device_items.pickling, "_has_news", lambda token: next(news))
    unpickled.clear()
    assert channel.get()[0].sum() == 15
    assert len(unpickled) == 1


unpickled = []


class Noted:
    def __reduce__(self):
        return note, ()


def note():
    unpickled.append(1)


@pytest.mark.slow
def test_a_sender_that_cannot_copy_says_why(devices, channel, peer):
    other = peer("two")
    assert other.ask("copying fails") == "so be it"
    assert other.ask("put 2") == "put"
    with pytest.raises(WorkerError, match="could not copy its tensors to host memory: ZeroDivisionError: division by"):
        channel.get(timeout_s=60)
    wait_until(lambda: other.ask("num kept") == "0")


def test_a_receiver_with_too_many_open_files_does_not_blame_the_sender(devices, channel, monkeypatch):
    channel.put(numbers(4))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def has_news(token):
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # no descriptor is below that and free
        return True

    monkeypatch.setattr(device_items.pickling, "_has_news", has_news)
    device_items.move_to_host()  # so that its memory is in the token, and nobody opens a file meanwhile
    try:
        with pytest.raises(OSError, match="this process has too many open files to take the memory"):
            channel.get(timeout_s=60)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.slow
def test_a_sender_that_does_not_answer_is_named(devices, channel, peer, monkeypatch):
    other = peer("two")
    assert other.ask("put 2") == "put"
    os.kill(other.process.pid, signal.SIGSTOP)
    threads = list(Path(f"/proc/{other.process.pid}/task").iterdir())
    wait_until(lambda: all((thread / "stat").read_text().rpartition(")")[2].split()[0] == "T" for thread in threads))
    monkeypatch.setattr(device_items.pickling, "_ANSWER_S", 0.1)
    with pytest.raises(DeadlineError, match=rf"\(pid {other.process.pid}\) did not copy 512 bytes of tensors"):
        channel.get(timeout_s=60)
