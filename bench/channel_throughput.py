"""Items per second through a channel between two Ray processes, against `ray.util.queue.Queue` in the same run.

    python bench/channel_throughput.py [--seconds 4]
    python bench/channel_throughput.py --keys 10000
    python bench/channel_throughput.py --cuda

Each row moves items from a producer process to a consumer process and counts what arrives in the given time, after
the first item, by put and get of single items; "batches" gets up to 64 together, by weight. The queue's rows do the
same with its put and get, and its put_nowait_batch and get_nowait_batch.

With --keys it measures nothing of that, but what stays of keys of an RLinf channel that are used once: an item is put
under each and taken, by plain and by asynchronous operations.

With --cuda it measures neither, but CUDA tensors between two processes on one device: the seconds from `put` to
the end of `get`, by CUDA IPC and through host memory.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from typing import Any

import numpy as np

from hotseat.cluster import Cluster
from hotseat.rlinf.broker import Broker
from hotseat.rlinf.queues import Queue, QueueDirectory

TARGET = 2000  # single small items per second
NUM_TURNS = 15


class End:
    """One end, in a process of its own. An empty item ends the stream."""

    def produce(self, channel: Queue, size: int, batch: int, seconds: float) -> None:
        item = os.urandom(size)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            channel.put(item, weight=1)
        channel.put(b"", weight=batch)

    def consume(self, channel: Queue, batch: int) -> float:
        count, begin, is_over = 0, 0.0, False
        while not is_over:
            items = [channel.get()] if batch == 1 else channel.get_weight(batch)
            is_over = not items[-1]
            count += len(items) - is_over
            begin = begin or time.monotonic()
        return count / (time.monotonic() - begin)

    def produce_queue(self, queue: Any, size: int, batch: int, seconds: float) -> None:
        from ray.util.queue import Full

        item = os.urandom(size)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if batch == 1:
                queue.put(item)
            else:
                try:
                    queue.put_nowait_batch([item] * batch)
                except Full:
                    time.sleep(0.001)
        queue.put(b"")

    def consume_queue(self, queue: Any, batch: int) -> float:
        count, begin, is_over = 0, 0.0, False
        while not is_over:
            if batch == 1:
                items = [queue.get()]
            else:
                waiting = min(batch, queue.qsize())
                items = queue.get_nowait_batch(waiting) if waiting else []
            is_over = b"" in items
            count += len(items) - is_over
            begin = begin or (time.monotonic() if items else 0.0)
        return count / (time.monotonic() - begin)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--keys", type=int, default=0)
    parser.add_argument("--cuda", action="store_true")
    args = parser.parse_args()
    if args.keys:
        use_keys_once(args.keys)
        return
    if args.cuda:
        compare_on_cuda()
        return
    seconds = args.seconds
    with Cluster(num_devices=0, object_store_bytes=1 << 30) as cluster:
        from ray.util.queue import Queue

        ends = cluster.launch("ends", End, processes=2)
        rows = []
        for size, batch in ((40, 1), (40, 64), (1 << 20, 1)):
            channel = QueueDirectory.of_node(cluster, None, 600.0).open(f"{size} bytes by {batch}", 128)
            producing = ends.on(0).start(End.produce, channel, size, batch, seconds)
            ours = ends.on(1).within(60 + seconds).call(End.consume, channel, batch)[0]
            producing.result(60)
            queue = Queue(maxsize=128, actor_options={"num_cpus": 0})
            producing = ends.on(0).start(End.produce_queue, queue, size, batch, seconds)
            theirs = ends.on(1).within(60 + seconds).call(End.consume_queue, queue, batch)[0]
            producing.result(60)
            queue.shutdown(force=True)
            rows.append((size, batch, ours, theirs))
    print(f"{'item':>10}  {'at once':>8}  {'channel /s':>11}  {'ray Queue /s':>13}  {'ratio':>6}  {'channel MB/s':>13}")
    for size, batch, ours, theirs in rows:
        name = f"{size} B" if size < 1 << 20 else f"{size >> 20} MiB"
        how, megabytes = "one" if batch == 1 else "batches", ours * size / 1e6
        print(f"{name:>10}  {how:>8}  {ours:>11,.0f}  {theirs:>13,.0f}  {ours / theirs:>6.1f}  {megabytes:>13,.1f}")
    single = rows[0][2]
    print(f"target: over {TARGET:,} single small items/s: {'met' if single > TARGET else 'missed'} ({single:,.0f})")
    for num_mib in (1, 19, 76):  # 19 MiB: 128 frames of 224 x 224
        best_s = put_and_get(num_mib << 20)
        print(
            f"{num_mib:>6} MiB  put, then get in the same process: {best_s * 1e3:6.1f} ms, the fastest of {NUM_TURNS}"
        )


def put_and_get(num_bytes: int) -> float:
    """Return the least seconds in which an array crosses a channel, by way of the broker."""
    item = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        broker = Broker(folder)
        channel = QueueDirectory(broker.address, 600.0).open("arrays", 1)
        for _ in range(NUM_TURNS):
            started_s = time.perf_counter()
            channel.put(item)
            assert len(channel.get()) == num_bytes
            seconds.append(time.perf_counter() - started_s)
        broker.close()
    return min(seconds)


def use_keys_once(num_keys: int) -> None:
    """Print how fast items cross under a key each, and what is left of the keys then."""
    from hotseat.rlinf.channel import Channel

    print(f"{'operations':>12}  {'keys /s':>8}  {'sockets':>8}  {'threads':>8}  {'here MiB':>9}  {'broker MiB':>10}")
    for is_async in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            broker = Broker(folder)
            channel = Channel("keys", 0, QueueDirectory(broker.address, 600.0))
            channel.put(0, key="first")
            channel.get(key="first")
            before = resident_mib("self"), resident_mib(broker.pid)
            started_s = time.perf_counter()
            for key in range(num_keys):
                put = channel.put(key, key=key, async_op=is_async)
                got = channel.get(key=key, async_op=is_async)
                if is_async:
                    put.wait()
                    got = got.wait()
                assert got == key
            seconds = time.perf_counter() - started_s
            grown = resident_mib("self") - before[0], resident_mib(broker.pid) - before[1]
            print(
                f"{'asynchronous' if is_async else 'plain':>12}  {num_keys / seconds:>8,.0f}"
                f"  {len(os.listdir(f'/proc/{broker.pid}/fd')):>8,}  {threading.active_count():>8,}"
                f"  {grown[0]:>+9.1f}  {grown[1]:>+10.1f}",
                flush=True,
            )
            broker.close()


def resident_mib(pid: int | str) -> float:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def take_tensors(there: Queue, back: Queue) -> None:
    """Get tensors until the stream ends; answer each with its sum, if that is asked for, or None."""
    import torch

    torch.zeros(1, device="cuda")
    back.put(None)
    while (item := there.get()) is not None:
        tensor, is_summed = item
        back.put(tensor.sum(dtype=torch.int64).item() if is_summed else None)
        del tensor, item
        if is_summed:
            torch.cuda.empty_cache()


def compare_on_cuda() -> None:
    """Print how fast tensors cross by the device's memory and through the host's."""
    import multiprocessing

    import torch

    from hotseat.rlinf import device_items
    from hotseat.rlinf.device_items.cuda import CudaDevices

    class HostOnly(CudaDevices):
        def allocate(self, device: torch.device, num_bytes: int) -> None:
            return None

    device_items.pickling.MIN_ON_DEVICE = 0
    with tempfile.TemporaryDirectory() as folder:
        broker = Broker(folder)
        there, back = (QueueDirectory(broker.address, 600.0).open(name, 4) for name in ("there", "back"))
        taking = multiprocessing.get_context("spawn").Process(target=take_tensors, args=(there, back), daemon=True)
        taking.start()
        back.get(timeout_s=120)
        torch.zeros(1, device="cuda")
        before = torch.cuda.mem_get_info()[0]
        print(f"{'tensor':>10}  {'IPC ms':>8}  {'IPC GB/s':>9}  {'host ms':>8}  {'host GB/s':>9}", flush=True)
        for num_kib in (16, 256, 1024, 4096, 1 << 14, 1 << 16, 1 << 18, 1 << 20):
            tensor = torch.randint(256, (num_kib << 10,), dtype=torch.uint8, device="cuda")
            total = tensor.sum(dtype=torch.int64).item()
            row = []
            for devices in (None, HostOnly()):
                device_items.use(devices)
                best_s = min(crossing_s(there, back, tensor) for _ in range(NUM_TURNS if num_kib <= 1 << 16 else 4))
                there.put((tensor, True))
                assert back.get(timeout_s=120) == total, "other values arrived"
                row += [f"{best_s * 1e3:8.2f}", f"{tensor.nbytes / best_s / 1e9:9.2f}"]
            size = f"{num_kib} KiB" if num_kib < 1024 else f"{num_kib >> 10} MiB"
            print(f"{size:>10}  {'  '.join(row)}", flush=True)
        del tensor
        until_s = time.monotonic() + 5
        while (num_kept := device_items.num_kept()) and time.monotonic() < until_s:
            time.sleep(0.01)
        torch.cuda.empty_cache()
        after = torch.cuda.mem_get_info()[0]
        print(f"device memory in use since the first: {(before - after) >> 20:+} MiB, items kept: {num_kept}")
        there.put(None)
        taking.join(60)
        broker.close()


def crossing_s(there: Queue, back: Queue, tensor: Any) -> float:
    started_s = time.perf_counter()
    there.put((tensor, False))
    back.get(timeout_s=120)
    return time.perf_counter() - started_s


if __name__ == "__main__":
    main()
