"""A runtime that is added to the registry is one that configs and clusters can name."""

import pytest

from hotseat.cluster import Cluster
from hotseat.cluster.local import LocalRuntime
from hotseat.config import loads
from hotseat.errors import UserError
from hotseat.registry.runtimes import RUNTIMES, RuntimeEntry

OPENED = []


class ManyDevices(LocalRuntime):
    """A runtime with ten times the devices that are asked for."""


def open_runtime(session, options):
    OPENED.append(options)
    return ManyDevices(10 * options.num_devices)


@pytest.fixture
def many_devices(monkeypatch):
    monkeypatch.setitem(RUNTIMES, "many", RuntimeEntry("many", "Ten for one.", f"{__name__}:open_runtime"))


def test_a_runtime_is_opened_by_its_entry(many_devices):
    assert not loads("task: rl\ncluster: {runtime: many}").cluster.is_in_process
    with Cluster("many", num_devices=3, num_cpus=2) as cluster:
        assert cluster.runtime == "many"
        assert cluster.devices_of(0) == range(30)
    assert (OPENED[-1].num_devices, OPENED[-1].num_cpus) == (3, 2)


def test_only_the_local_runtime_is_in_the_process_that_opens_it():
    assert {name for name, entry in RUNTIMES.items() if entry.is_in_process} == {"local"}


def test_a_runtime_without_an_entry_is_refused():
    with pytest.raises(UserError, match="cloud"):
        loads("task: rl\ncluster: {runtime: cloud}")
