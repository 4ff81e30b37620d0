"""Plain classes that the tests run in groups, and how these and the tests wait for each other."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from waiting import PATIENCE_S, wait_until


class Plain:
    """Answers about itself, and misbehaves on request."""

    max_concurrency = 1

    def __init__(self, base: int = 0, **extra):
        if base == -1 and os.environ.get("RANK") == "1":
            raise RuntimeError("cannot be made")
        self.base = base
        self.extra = extra

    def add(self, value: int, *, twice: bool = False) -> int:
        return self.base + value * (2 if twice else 1)

    def rank(self) -> int:
        return int(os.environ["RANK"])

    def environment_values(self) -> list[str]:
        return ["RANK", os.environ["RANK"]]

    def note(self, value: int) -> None:
        self.extra.setdefault("noted", []).append(value)

    def noted(self) -> list[int]:
        return self.extra["noted"]

    def environment(self, *names: str) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in names}

    def pid(self) -> int:
        return os.getpid()

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def rank_sleeps(self, rank: int, seconds: float) -> int:
        if self.rank() == rank:
            time.sleep(seconds)
        return self.rank()

    def wait_for_file(self, begun: str, end: str, rank: int | None = None) -> None:
        """Makes the first file, and waits for the second. If a rank is named, only there."""
        if rank is None or self.rank() == rank:
            Path(begun).touch()
            wait_until(Path(end).exists)

    def fail(self, text: str = "on purpose") -> None:
        self.detail = "seen in the frame"
        raise ValueError(text)

    def rank_fails(self, rank: int, others_wait_for: str) -> None:
        if self.rank() == rank:
            raise ValueError("one rank only")
        wait_until(Path(others_wait_for).exists)

    def fail_unpicklably(self) -> None:
        class Local(Exception):
            def __reduce__(self):
                raise TypeError("not me")

        raise Local(threading.Lock())

    def exit(self) -> None:
        sys.exit(3)

    def die(self, text: str = "last words") -> None:
        print(text, file=sys.stderr, flush=True)
        os._exit(7)

    def lock(self):
        return threading.Lock()

    def count(self):
        yield 1

    def fail_at_length(self) -> None:
        raise ValueError("x" * 10_000_000)

    def make(self, num_bytes: int) -> bytes:
        return bytes(num_bytes)

    def size(self, value) -> int:
        return len(value)

    def sizes(self, values: list) -> list[int]:
        return [len(value) for value in values]

    def spawn_child(self) -> int:
        """A child that does not go away with this process: in a session of its own, its environment not to be read."""
        command = [sys.executable, "-c", "import time; time.sleep(300)"]
        child = subprocess.Popen(command, start_new_session=True, env={})
        return child.pid

    def threads(self) -> tuple[int, str | None]:
        import torch

        return torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")

    def all_reduce(self, value: float) -> float:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        tensor = torch.tensor([value * (dist.get_rank() + 1)])
        dist.all_reduce(tensor)
        dist.destroy_process_group()
        return float(tensor)

    def mapping_of(self, array) -> str:
        """Return the file whose mapping an array lies in, as the system names it; empty: in memory of its own."""
        address = array.ctypes.data
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, *_, name = line.split(maxsplit=5)
            first, last = (int(end, 16) for end in span.split("-"))
            if first <= address < last:
                return name if name.startswith("/") else ""
        return ""

    def send_array(self, group, num_bytes: int) -> list[str]:
        """Send an array to another group; return where it lies there."""
        return group.call(Plain.mapping_of, np.zeros(num_bytes, dtype=np.uint8))

    def call_other(self, group, method: Callable, *args) -> list:
        return group.within(PATIENCE_S).call(method, *args)

    def close_other(self, group) -> None:
        group.close()

    def produce(self, channel, count: int) -> int:
        for value in range(count):
            channel.put(value, timeout_s=PATIENCE_S)
        return count

    def consume(self, channel, count: int) -> list:
        return [channel.get(timeout_s=PATIENCE_S) for _ in range(count)]

    def get(self, channel, timeout_s: float):
        return channel.get(timeout_s=timeout_s)

    def nest_actor(self) -> int:
        """An actor of this worker's own, outside what the group knows."""
        import ray

        self.nested = ray.remote(Plain).options(num_cpus=0).remote()
        return ray.get(self.nested.pid.remote(), timeout=300)


class Busy:
    """Answers health checks while it works."""

    max_concurrency = 3

    def __init__(self):
        self.is_working = False

    def work(self, seconds: float) -> str:
        self.is_working = True
        time.sleep(seconds)
        self.is_working = False
        return "done"

    def work_until(self, path: str) -> str:
        """Until there is that file."""
        self.is_working = True
        wait_until(Path(path).exists)
        self.is_working = False
        return "done"

    def health(self) -> bool:
        return self.is_working


class Waiting:
    """Coroutine methods: many requests at once on one event loop."""

    def __init__(self):
        self.num_running = 0
        self.all_run = asyncio.Event()

    async def meet(self, value: int, num: int) -> int:
        """Answers when so many run at once."""
        self.num_running += 1
        if self.num_running == num:
            self.all_run.set()
        await asyncio.wait_for(self.all_run.wait(), PATIENCE_S)
        return value

    def peak(self) -> int:
        return self.num_running

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def fail(self) -> None:
        raise KeyError("async")


class Closing:
    """Says goodbye in a file."""

    def __init__(self, path: str):
        self.path = path

    def close(self) -> None:
        with open(self.path, "a") as file:
            file.write("closed\n")
