"""One Ray cluster for the tests of a file that can share it.

Not for more: until it is closed, its variables are in the environment of this process, where other tests run next.
"""

from __future__ import annotations

import pytest

from hotseat.cluster import Cluster


@pytest.fixture(scope="module")
def ray_cluster():
    with Cluster(num_devices=8, num_cpus=4, object_store_bytes=512 << 20) as cluster:
        yield cluster
