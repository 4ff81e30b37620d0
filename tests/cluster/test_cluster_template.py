"""Workers that are forked from a template are like others, and what cannot be forked starts as an ordinary process."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest
from cluster_workers import Plain, wait_until

from hotseat.cluster import Cluster, Process, started_template
from hotseat.cluster._guard import process_state
from hotseat.cluster._ray.template import SWITCH
from hotseat.cluster._ray.template_process import differing
from hotseat.openmp import thread_env


class Forked(Plain):
    """Answers about the process that it is in."""

    def parent(self) -> int:
        return os.getppid()

    def loaded(self) -> bool:
        return "xml.dom.minidom" in sys.modules

    def draws(self) -> tuple[float, float]:
        import numpy

        return random.random(), float(numpy.random.random())

    def group(self) -> int:
        return os.getpgid(0)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


@pytest.mark.ray
@pytest.mark.slow
def test_workers_are_forks_with_an_environment_and_random_numbers_of_their_own():
    with started_template(["numpy", "xml.dom.minidom"], thread_env(1)) as template:
        assert template is not None
        workers_template = template.pids[1]
        with Cluster(num_devices=2, template=template) as cluster:
            cluster.prepare("forks", Forked, processes=[Process(0, 0, (0,)), Process(1, 0, (1,))])
            forks = cluster.launch("forks", Forked, processes=[Process(0, 0, (0,)), Process(1, 0, (1,))])
            assert forks.call(Forked.parent) == [workers_template] * 2
            assert forks.call(Forked.loaded) == [True, True]
            assert forks.call(Forked.rank) == [0, 1]
            names = ("RANK", "CUDA_VISIBLE_DEVICES")
            assert forks.call(Forked.environment, *names) == [
                dict(zip(names, values, strict=True)) for values in (("0", "0"), ("1", "1"))
            ]
            assert forks.call(Forked.group) == forks.pids()
            first, second = forks.call(Forked.draws)
            assert first[0] != second[0]
            assert first[1] != second[1]
            # A library may read any variable when it is loaded, so this one is no fork.
            other = cluster.launch("other", Forked, env={"SOME_SETTING": "1"})
            assert other.call(Forked.parent) != [workers_template]
            assert other.call(Forked.loaded) == [False]
            assert other.call(Forked.environment, "SOME_SETTING") == [{"SOME_SETTING": "1"}]
            (before,) = forks.on(1).call(Forked.pid)
            forks.restart(1)
            assert forks.on(1).call(Forked.parent) == [workers_template]
            assert forks.on(1).call(Forked.pid) != [before]
            # Without its template a worker is an ordinary process.
            os.kill(workers_template, 9)
            wait_until(lambda: process_state(workers_template) == "gone")
            assert forks.call(Forked.rank) == [0, 1]
            late = cluster.launch("late", Forked)
            assert late.call(Forked.loaded) == [False]
        pids = template.pids
    assert [pid for pid in pids if process_state(pid) != "gone"] == []


def test_there_is_no_template_where_it_is_of_no_use_or_switched_off(monkeypatch):
    with started_template(["json"], {}, is_useful=False) as template:
        assert template is None
    monkeypatch.setenv(SWITCH, "0")
    with started_template(["json"], {}) as template:
        assert template is None


def test_variables_that_ray_and_we_set_for_each_process_may_differ():
    ours = {"HOME": "/home", "RAY_NODE_ID": "1", "OMP_NUM_THREADS": "2", "HF_HOME": "/a"}
    assert (
        differing(ours, {**ours, "RAY_NODE_ID": "2", "RANK": "1", "HOTSEAT_WORKER": "a:b", "OMP_NUM_THREADS": "1"})
        == set()
    )
    assert differing(ours, {**ours, "HF_HOME": "/b", "TORCH_LOGS": "all"}) == {"HF_HOME", "TORCH_LOGS"}
    assert differing(ours, {"HOME": "/home"}) == {"HF_HOME"}
