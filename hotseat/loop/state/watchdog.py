"""Watches the processes of a run: draws their calls into the timeline, ends silent ones, and explains hangs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from hotseat.cluster import Cluster, WorkerGroup, activity
from hotseat.cluster.doctor import Diagnosis, Watch, examine, is_hang
from hotseat.errors import DeadlineError, RunError
from hotseat.files import opened
from hotseat.loop.state.run_dir import HANGS
from hotseat.loop.workers.model_workers import BackendWorker
from hotseat.observe import Journal


@contextmanager
def watch_processes(
    cluster: Cluster, journal: Journal, run_dir: Path, silence_s: float, pinged: Sequence[str] = ()
) -> Iterator[None]:
    """Watch the processes of a run while its groups work. `pinged`: groups that answer pings while they work."""

    def draw(group: str, rank: int, method: str, started_s: float, ended_s: float) -> None:
        if method == BackendWorker.is_written.__name__:
            return  # called often while the rank works, and would be drawn over that work
        journal.timeline.span(group, f"{group} {rank}", method, started_s, ended_s)

    def on_silence(group: WorkerGroup[Any], rank: int, why: str) -> None:
        pid = group.known_pids()[rank]
        waits = f"{group.name} rank {rank} (pid {pid}) is ended: {why}"
        diagnosis = examine(cluster.groups.values(), waits=waits)
        _keep(run_dir, diagnosis)
        journal.say(f"{waits} (stacks: {run_dir / HANGS})", kind="fault")

    cluster.on_call = draw
    watch = None
    if not cluster.is_in_process:
        watch = Watch(cluster.groups, pinged=pinged, limit_s=silence_s, on_silence=on_silence)
    try:
        yield
    except RunError as error:
        diagnosis = record_hang(cluster, journal, run_dir, error)
        if diagnosis is not None:
            raise DeadlineError(f"culprit: {diagnosis.culprit}; {error}\n(stacks: {run_dir / HANGS})") from error
        raise
    finally:
        if watch is not None:
            watch.close()


def record_hang(cluster: Cluster, journal: Journal, run_dir: Path, error: RunError) -> Diagnosis | None:
    """Record who waits for whom if an error is a wait that ran out; otherwise return None."""
    if cluster.is_in_process or not is_hang(error):
        return None
    diagnosis = examine(cluster.groups.values(), error)
    _keep(run_dir, diagnosis)
    journal.say(diagnosis.summary(), kind="fault")
    return diagnosis


def doing_in(cluster: Cluster) -> list[str]:
    """Describe what each process that is still starting on this machine does, a line each."""
    directory = os.environ.get(activity.DIRECTORY, "")
    lines = []
    for group in list(cluster.groups.values()):
        starting = group.starting_ranks()
        for rank in starting[:MOST_NAMED]:
            doing = activity.read_activity(directory, f"{group.name}-{rank}")
            who = f"{'engine' if group.name == ENGINES else group.name} {rank}"
            since = f", {max(0.0, time.time() - doing[-1].since_s):.0f} s" if doing else ""
            lines.append(f"{who}: {doing[-1].what if doing else 'starting its process'}{since}")
        if len(starting) > MOST_NAMED:
            lines.append(f"{len(starting) - MOST_NAMED} more of {group.name}")
    return lines


def _keep(run_dir: Path, diagnosis: Diagnosis) -> None:
    with opened(run_dir / HANGS, "a") as file:
        file.write(diagnosis.text() + "\n")


MOST_NAMED = 16  # processes of a role that is starting
ENGINES = "rollout"  # the role whose processes are announced one by one


class Readiness:
    """Shows a line for each role, and for each engine, when it is ready. Groups report from other threads."""

    def __init__(self, show: Callable[[str], object]):
        self._show = show
        self._lock = threading.Lock()
        self._waiting: dict[str, set[int]] = {}  # ranks of each role that are not ready yet
        self._is_closed = False

    def watch(self, group: WorkerGroup[Any], started_s: float) -> None:
        """Announce a group that was launched at `started_s`, by `time.monotonic`."""
        self._waiting[group.name] = set(group.ranks)
        group.when_started(partial(self._note, group.name, group.size, started_s))

    def close(self) -> None:
        with self._lock:
            self._is_closed = True

    def _note(self, role: str, size: int, started_s: float, rank: int) -> None:
        with self._lock:
            waiting = self._waiting[role]
            if self._is_closed or rank not in waiting:
                return
            waiting.remove(rank)
            after = f"ready after {time.monotonic() - started_s:.1f} s"
            if role == ENGINES:
                self._show(f"engine {rank} {after}")
            elif not waiting:
                self._show(f"{role} {after}{f' ({size} ranks)' if size > 1 else ''}")
