"""RLinf's API on Ray: the examples run as they are written, and failures reach whoever waits."""

from __future__ import annotations

import os
import runpy
import signal
import time
from pathlib import Path

import pytest

from hotseat.cluster import Cluster as HotseatCluster
from hotseat.cluster import started_template
from hotseat.errors import RunError, WorkerError
from hotseat.openmp import thread_env
from hotseat.rlinf import Channel, Cluster, NodePlacementStrategy, PackedPlacementStrategy, Worker

pytestmark = [pytest.mark.slow, pytest.mark.ray]

EXAMPLES = Path(__file__).parents[2] / "examples" / "rlinf"


@pytest.fixture(scope="module")
def shared():
    """One Ray cluster of 8 logical devices for this file; its processes start with torch loaded."""
    with (
        started_template(["torch", "transformers", "hotseat.rlinf.actor"], thread_env(1)) as template,
        HotseatCluster(num_devices=8, num_cpus=4, object_store_bytes=512 << 20, template=template) as cluster,
    ):
        yield cluster


@pytest.fixture
def cluster(shared):
    with Cluster(on=shared) as cluster:
        yield cluster


def run(name: str, *arguments: str, monkeypatch) -> dict:
    monkeypatch.setattr("sys.argv", [name, *arguments])
    return runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_workers_talk_to_each_other_and_meet_in_torch(cluster, monkeypatch):
    left = run("workers.py", monkeypatch=monkeypatch)
    assert [total.item() for total in left["totals"]] == [4.0] * 4
    assert left["some"] == [(0, 4), (3, 4)]
    assert left["replies"] == ["hello from 0, hello back", "hello from 1, hello back"]
    assert left["sums"] == [1 + 1 + 2 + 2 + 3 + 4 + 4] * 2
    assert left["shapes"] == [((3, 1), (4, 1))] * 2


def test_a_channel_has_keys_weights_and_a_bound(cluster, monkeypatch):
    left = run("channels.py", monkeypatch=monkeypatch)
    objects, batches, for_0 = left["consumed"][0]
    assert objects == ["an object", "another, asynchronously", "a third, with asyncio"]
    assert batches == [[3, 1], [4, 2]]
    assert (for_0, left["consumed"][1]) == ("for worker 0", "for worker 1")
    assert left["sizes"] == [2, 2]
    assert left["is_full"]
    assert left["refused"]
    assert left["guests"] == ["rank 0 was here", "rank 1 was here"]


def test_the_hybrid_mode_of_rlinf_trains_on_all_devices_what_env_and_rollout_made(cluster, task, monkeypatch):
    pytest.importorskip("omegaconf")
    left = run("hybrid.py", str(task / "model"), monkeypatch=monkeypatch)
    mode, metrics, num_sent, num_received = left["result"]
    assert mode == "hybrid"
    assert [step["rewards"] for step in metrics] == [8.0, 8.0]  # 4 environments, 2 stages, one of two answers is right
    assert [step["actor/version"] for step in metrics] == [1, 2]
    assert [step["actor/num_tokens"] for step in metrics] == [16, 16]
    assert metrics[0]["actor/grad_norm"] > 0
    assert num_sent == num_received > 0


class Router(Worker):
    def give(self, group, channel):
        import torch

        rows = torch.arange(6) + 6 * self._rank
        self.send_to(group, channel, {"rows": rows, "step": 3})
        self.send_to(group, None, rows, enable_p2p=True)

    def take(self, group, channel):
        batch = self.recv_from(group, channel, batch_size=12)
        direct = self.recv_from(group, None, batch_size=12, enable_p2p=True)
        return batch["rows"].tolist(), batch["step"], direct.tolist()


def test_a_batch_of_two_processes_is_shared_among_three(cluster):
    pair, three = NodePlacementStrategy([0, 0]), NodePlacementStrategy([0, 0, 0])
    senders = Router.create_group().launch(cluster, name="senders", placement_strategy=pair)
    receivers = Router.create_group().launch(cluster, name="receivers", placement_strategy=three)
    channel = Channel.create("routes")
    given = senders.give("receivers", channel)
    runs = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert receivers.take("senders", channel).wait() == [(run, 3, run) for run in runs]
    given.wait()


class DeviceSender(Worker):
    def send_from_device(self, channel, folder):
        """Put a tensor that waits on a device whose copies to the host are slow."""
        from pathlib import Path

        import torch
        from file_devices import FileDevices

        from hotseat.rlinf import device_items

        device_items.use(FileDevices(Path(folder)))
        device_items.pickling.MIN_ON_DEVICE = 0
        copy = device_items.keeper._host_copy
        device_items.keeper._host_copy = lambda blocks: (time.sleep(0.3), copy(blocks))[1]
        channel.put(torch.full((5,), 2.0, dtype=torch.float64))
        return device_items.num_kept()

    def send_and_hang(self, channel):
        channel.put("taken")
        channel.put("not taken")
        time.sleep(600)


def test_what_an_idle_worker_sent_from_its_device_is_there_after_its_group_was_closed(cluster, tmp_path):
    channel = Channel.create("from a device")
    senders = DeviceSender.create_group().launch(cluster, name="senders", placement_strategy=NodePlacementStrategy([0]))
    assert senders.send_from_device(channel, str(tmp_path)).wait() == [1]
    senders.close(grace_s=0.01)  # much less than the copy takes
    assert list(tmp_path.iterdir()) == []
    assert channel.get().tolist() == [2.0] * 5


def test_what_a_busy_worker_sent_is_an_error_of_the_receiver_after_its_group_was_closed(cluster):
    channel = Channel.create("from a busy one")
    senders = DeviceSender.create_group().launch(cluster, name="senders", placement_strategy=NodePlacementStrategy([0]))
    senders.send_and_hang(channel)
    assert channel.get() == "taken"
    senders.close(grace_s=0.01)
    with pytest.raises(WorkerError, match=r"from a busy one.*its producer senders\[0\].*went away"):
        assert [channel.get(), channel.get()] == []  # an error instead of a wait without end


class Careless(Worker):
    def fail(self):
        raise ValueError("no such thing")

    def look_around(self):
        """Use the cluster from within a worker."""
        here = Cluster()
        Channel.create("made in a worker").put("hello")
        with pytest.raises(RunError, match="a worker cannot launch more: do it in the program that made the cluster"):
            Careless.create_group().launch(here, name="more")
        here.close()
        return here.num_nodes, here.num_accelerators, os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]

    def wait_for(self, group):
        return self.recv(group, 0)

    def hold(self):
        with self.device_lock:
            os.kill(os.getpid(), signal.SIGKILL)

    def pid_under_lock(self):
        with self.device_lock, self.device_lock:
            return os.getpid()


def test_a_failure_that_nobody_waits_for_ends_the_wait_for_another_worker(cluster):
    one = NodePlacementStrategy([0])
    careless = Careless.create_group().launch(cluster, name="careless", placement_strategy=one)
    patient = Careless.create_group().launch(cluster, name="patient", placement_strategy=one)
    maker = Careless.create_group().launch(cluster, name="maker", placement_strategy=one)
    assert maker.look_around().wait() == [(1, 8, "0", "1")]
    maker.close()
    assert Channel.connect("made in a worker").get() == "hello"  # though its maker has ended
    waiting = patient.wait_for("careless")
    careless.fail()
    with pytest.raises(WorkerError, match="careless rank 0: 'fail' raised ValueError: no such thing"):
        waiting.wait()


def test_whoever_waits_for_the_device_of_a_process_that_died_learns_its_name(cluster):
    on_0 = PackedPlacementStrategy(0, 0)
    dying = Careless.create_group().launch(cluster, name="dying", placement_strategy=on_0)
    next_one = Careless.create_group().launch(cluster, name="next", placement_strategy=on_0)
    assert next_one.pid_under_lock().wait() == next_one.pid_under_lock().wait()
    with pytest.raises(WorkerError, match="dying rank 0"):
        dying.hold().wait()
    with pytest.raises(WorkerError, match=r"lock of device 0.*dying\[0\]"):
        next_one.pid_under_lock().wait()
