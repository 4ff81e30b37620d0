"""One Ray cluster for the tests of a file that can share it. Its workers are forked off a template, as in a run.

Not for more: until it is closed, its variables are in the environment of this process, where other tests run next.
"""

from __future__ import annotations

import pytest

from hotseat.cluster import Cluster, started_template
from hotseat.openmp import thread_env


@pytest.fixture(scope="module")
def ray_cluster():
    with (
        started_template(["torch", "transformers"], thread_env(1)) as template,
        Cluster(num_devices=8, num_cpus=4, object_store_bytes=512 << 20, template=template) as cluster,
    ):
        yield cluster
