"""A cluster of RLinf's in one process, for the tests of a file."""

from __future__ import annotations

import pytest

from hotseat.cluster import Cluster as HotseatCluster
from hotseat.rlinf import Cluster


@pytest.fixture(scope="module")
def machinery():
    with HotseatCluster("local", num_devices=4) as machinery:
        yield machinery


@pytest.fixture
def cluster(machinery):
    with Cluster(on=machinery) as cluster:
        yield cluster
