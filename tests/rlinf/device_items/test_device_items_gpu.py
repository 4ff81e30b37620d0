"""CUDA tensors inside items of channels, between processes on one GPU."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from queue_tools import fail, queue_of
from waiting import wait_until

from hotseat.errors import WorkerError
from hotseat.rlinf import device_items
from hotseat.rlinf.broker import Broker
from hotseat.rlinf.device_items.cuda import CudaDevices
from hotseat.rlinf.work import Lane

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PEER = Path(__file__).parents[2] / "helpers" / "device_peer_gpu.py"
GIB = 1 << 30


class HostOnly(CudaDevices):
    """Devices whose memory no other process maps."""

    def allocate(self, device, num_bytes):
        return None


class Peer:
    def __init__(self, folder: Path, broker: Broker, **environment: str):
        self.there, self.back = (queue_of(broker, name, 8) for name in ("there", "back"))
        path = folder / f"channels-{len(list(folder.iterdir()))}"
        path.write_bytes(pickle.dumps((self.there, self.back)))
        self.process = subprocess.Popen(
            [sys.executable, str(PEER), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def tell(self, order: str) -> None:
        self.process.stdin.write(f"{order}\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        return self.process.stdout.readline().rstrip("\n")

    def ask(self, order: str) -> str:
        self.tell(order)
        return self.hear()

    def end(self) -> None:
        self.process.kill()
        self.process.wait(60)


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    """Two other processes; the second has expandable segments."""
    folder = tmp_path_factory.mktemp("peers")
    broker = Broker(str(tmp_path_factory.mktemp("b")))
    segments = "expandable_segments:True"
    made = [
        Peer(folder, broker),
        Peer(folder, broker, PYTORCH_CUDA_ALLOC_CONF=segments, PYTORCH_ALLOC_CONF=segments),
    ]
    torch.zeros(1, device="cuda")
    assert [peer.hear() for peer in made] == ["ready", "ready"]
    yield made
    for peer in made:
        peer.end()
    broker.close()


@pytest.fixture
def peer(peers):
    return peers[0]


def used() -> int:
    """Return how much of the device's memory is in use, by all processes."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_values_arrive_by_the_devices_memory_and_come_back(peer):
    a = torch.randn(1 << 20, device="cuda", dtype=torch.bfloat16)
    turned = torch.randn(300, 500, device="cuda").t()
    item = {"nested": [{"a": a, "again": a}, (turned, torch.nn.Parameter(torch.randn(7, device="cuda")))]}
    item |= {"cpu": torch.arange(5), "empty": torch.empty(0, 3, device="cuda"), "one": torch.tensor(2.5, device="cuda")}
    peer.there.put(item)
    assert peer.ask("echo") == "mapped 1"
    arrived = peer.back.get(timeout_s=60)
    first, (matrix, parameter) = arrived["nested"]
    assert first["a"] is first["again"]
    pairs = [(first["a"], a), (matrix, turned), (parameter, item["nested"][1][1]), (arrived["one"], item["one"])]
    for mine, other in pairs:
        assert mine.device == other.device
        assert torch.equal(mine, other)
    assert matrix.stride() == turned.stride()
    assert isinstance(parameter, torch.nn.Parameter)
    assert arrived["empty"].shape == (0, 3)
    wait_until(lambda: device_items.num_kept() == 0)


def test_what_the_sender_drops_or_overwrites_arrives_as_it_was(peer):
    tensor = torch.ones(4 << 20, device="cuda")
    peer.there.put(tensor)
    tensor.zero_()
    del tensor
    torch.cuda.empty_cache()
    torch.full((64 << 20,), 7.0, device="cuda")  # where it was
    assert peer.ask("get").startswith("cuda:0 4194304 mapped")


def test_the_senders_kernels_are_waited_for(peer):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor = torch.zeros(4 << 20, device="cuda")
        torch.cuda._sleep(1_000_000_000)  # clock cycles: half a second
        tensor.add_(1)
        peer.there.put(tensor)
    assert peer.ask("get").startswith("cuda:0 4194304 mapped")


def test_an_operation_beside_its_caller_has_the_callers_stream(peer):
    stream, lane = torch.cuda.Stream(), Lane()
    with torch.cuda.stream(stream):
        tensor = torch.zeros(4 << 20, device="cuda")
        torch.cuda._sleep(1_000_000_000)
        tensor.add_(1)
        work = lane.start(lambda: peer.there.put(tensor))
        seen = lane.start(torch.cuda.current_stream).wait()
    work.wait()
    assert seen == stream
    assert peer.ask("get").startswith("cuda:0 4194304 mapped")


def test_memory_is_freed_whether_an_item_is_taken_or_not(peer, tmp_path):
    assert peer.ask("empty cache") == "0"
    before, allocated = used(), torch.cuda.memory_allocated()
    for _ in range(3):
        peer.there.put(torch.ones(256 << 20, dtype=torch.uint8, device="cuda"))
        assert peer.ask("get").startswith(f"cuda:0 {256 << 20} mapped")
    wait_until(lambda: device_items.num_kept() == 0)
    broker = Broker(str(tmp_path))
    dropped = queue_of(broker, "dropped", 8)
    dropped.put(torch.ones(256 << 20, dtype=torch.uint8, device="cuda"))
    dropped.put(torch.ones(256 << 20, dtype=torch.uint8, device="cuda"))
    assert device_items.num_kept() == 2
    assert torch.cuda.memory_allocated() >= allocated + (512 << 20)
    fail(dropped)
    wait_until(lambda: device_items.num_kept() == 0)
    broker.close()
    assert peer.ask("empty cache") == "0"
    wait_until(lambda: torch.cuda.memory_allocated() == allocated)
    print(f"\nin use before {before >> 20} MiB, after {used() >> 20} MiB", flush=True)
    wait_until(lambda: used() <= before + (64 << 20))


def test_a_gibibyte_is_much_faster_than_through_host_memory(peer, capsys):
    tensor = torch.ones(GIB, dtype=torch.uint8, device="cuda")
    seconds = {}
    for way, devices in (("device", None), ("host", HostOnly())):
        device_items.use(devices)
        times = []
        for _ in range(4):
            peer.tell("get")
            torch.cuda.synchronize()
            begin = time.perf_counter()
            peer.there.put(tensor)
            assert peer.hear().startswith(f"cuda:0 {GIB} mapped")
            times.append(time.perf_counter() - begin)
        seconds[way] = times
    device_items.use(None)
    with capsys.disabled():
        for way, times in seconds.items():
            each = ", ".join(f"{s * 1e3:.1f}" for s in times)
            print(f"\n1 GiB by way of the {way}, until it is summed there: {each} ms", end="", flush=True)
        print()
    assert min(seconds["device"]) < min(seconds["host"]) / 3


def test_tensors_in_expandable_segments_arrive(peers, capsys):
    peer = peers[1]
    outcome = peer.ask("put 64")
    tensor = peer.back.get(timeout_s=60)
    with capsys.disabled():
        print(f"\nfrom expandable segments: {outcome}", flush=True)
    assert tensor.device.type == "cuda"
    assert tensor.sum(dtype=torch.int64).item() == 3 * (64 << 20)


def test_a_killed_sender_is_named(peer):
    assert peer.ask("put 64") == "put, 1 kept"
    assert peer.ask("hang up") == "None"
    peer.end()
    with pytest.raises(WorkerError, match=rf"\(pid {peer.process.pid}\) ended before the tensors of its item"):
        peer.back.get(timeout_s=60)
