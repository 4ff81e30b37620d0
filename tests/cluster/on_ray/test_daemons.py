"""Ray's own processes are watched: when one is gone, everybody who waits hears of it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from hotseat.cluster.on_ray.connection import RayConnection
from hotseat.cluster.on_ray.daemons import watch_daemons, watch_nodes
from hotseat.cluster.on_ray.ray_group import RayGroup
from hotseat.errors import ClusterError


@pytest.fixture
def process() -> Iterator[subprocess.Popen]:
    started = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    yield started
    started.kill()
    started.wait(60)


@pytest.mark.parametrize(("name", "words"), [("gcs_server", "GCS server"), ("raylet", "raylet")])
def test_a_daemon_that_is_killed_is_reported_once_by_name(process, name, words):
    told: list[ClusterError] = []
    heard = threading.Event()

    def lose(error: ClusterError) -> None:
        told.append(error)
        heard.set()

    daemons = watch_daemons({name: [SimpleNamespace(process=process)], "monitor": []}, lose)
    assert daemons.lost() is None
    process.kill()
    assert heard.wait(60)
    daemons.close()
    assert told == [daemons.lost()]
    assert str(told[0]).startswith(f"Ray's {words} (pid {process.pid}) died: without it no process of this run")


def test_daemons_that_live_until_they_are_closed_are_not_reported(process):
    told: list[ClusterError] = []
    daemons = watch_daemons({"raylet": [SimpleNamespace(process=process)]}, told.append)
    daemons.close()
    process.kill()
    process.wait(60)
    assert told == []


def test_calls_that_wait_fail_and_answered_ones_keep_their_answer():
    group = RayGroup("actor", [], timeout_s=1.0, log_directory="")
    waiting, starting, answered = Future(), Future(), Future()
    answered.set_result(1)
    group._pending |= {waiting, answered}
    group._starting = SimpleNamespace(futures={0: starting}), 1.0
    error = ClusterError("Ray is gone")
    group.lose(error)
    assert waiting.exception(0) is error
    assert starting.exception(0) is error
    assert answered.result(0) == 1


class StartsAtThe(RayConnection):
    """A connection whose starts fail until the last, as Ray's do."""

    def __init__(self, *errors: Exception):
        self._session = SimpleNamespace(name="nobody-has-this-mark")
        self._errors = list(errors)
        self.num_starts = 0

    def _start_once(self, *args: object) -> None:
        self.num_starts += 1
        if self._errors:
            raise self._errors.pop(0)


def test_ray_is_started_once_more_where_its_daemons_were_too_slow():
    slow = "The current node timed out during startup. This could happen because some of the raylet failed to startup"
    connection = StartsAtThe(Exception(slow))
    connection._start_own({"num_gpus": 1})
    assert connection.num_starts == 2
    twice = StartsAtThe(Exception(slow), Exception(slow))
    with pytest.raises(Exception, match="timed out during startup"):
        twice._start_own({"num_gpus": 1})
    assert twice.num_starts == 2
    other = StartsAtThe(ValueError("num_gpus"))
    with pytest.raises(ValueError, match="num_gpus"):
        other._start_own({"num_gpus": 1})
    assert other.num_starts == 1


def test_a_node_in_use_that_ray_has_lost_is_reported_once_and_others_are_not():
    told: list[ClusterError] = []
    asked, heard = threading.Event(), threading.Event()
    live, answers = {0, 1, 2}, [RuntimeError("Ray is busy")]

    def live_nodes() -> set[int]:
        if answers:
            raise answers.pop()
        asked.set()
        return live

    def lose(error: ClusterError) -> None:
        told.append(error)
        heard.set()

    watch = watch_nodes(lambda: {0: "node 0 (a, 10.0.0.1)", 1: "node 1 (b, 10.0.0.2)"}, live_nodes, lose, period_s=0.01)
    live.discard(2)  # nothing of ours is there
    assert asked.wait(60)
    assert watch.lost() is None
    live.discard(1)
    assert heard.wait(60)
    watch.close()
    assert told == [watch.lost()]
    assert str(told[0]).startswith("Ray has lost node 1 (b, 10.0.0.2): the processes of this run there are gone")


def test_a_node_is_known_to_be_lost_as_soon_as_somebody_asks():
    """A process that died with its node is not taken for one that died alone, however long the watch sleeps."""
    live = {0, 1}
    watch = watch_nodes(lambda: {1: "node 1 (b, 10.0.0.2)"}, lambda: live, lambda error: None, period_s=3600.0)
    live.discard(1)
    assert watch.lost() is None
    assert "Ray has lost node 1" in str(watch.lost(asks_ray=True))
    assert watch.lost() is not None
    watch.close()
