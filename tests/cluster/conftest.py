"""One Ray cluster for all tests that can share it."""

from __future__ import annotations

import pytest

from hotseat.cluster import Cluster


@pytest.fixture(scope="session")
def ray_cluster():
    with Cluster(num_devices=8, num_cpus=4, object_store_bytes=512 << 20) as cluster:
        yield cluster
