"""A driver for the tests of its end: `python driver_to_end.py HOW`. Prints its facts as JSON when everything runs."""

import json
import os
import sys
import time
from multiprocessing import resource_tracker, shared_memory

from cluster_workers import Plain

from hotseat.cluster import Cluster, Process, started_template
from hotseat.openmp import thread_env
from hotseat.rlinf.queues import QueueDirectory


class Holding(Plain):
    """Has a shared-memory segment, as weight transports have."""

    def segment(self) -> str:
        self.memory = shared_memory.SharedMemory(f"{os.environ['HOTSEAT_SHM_PREFIX']}weights", create=True, size=4096)
        resource_tracker.unregister(self.memory._name, "shared_memory")  # nobody but us cleans up
        return self.memory.name


def work(cluster: Cluster) -> None:
    group = cluster.launch("work", Holding, processes=[Process(0, 0, (0, 1))])
    channel = QueueDirectory.of_node(cluster, None, 600.0).open("numbers", 4)
    channel.put(1)
    facts = {
        "pid": os.getpid(),
        "session": cluster.session,
        "directory": cluster._session.directory,
        "guard": cluster._session.guard.pid,
        "workers": group.pids(),
        "children": group.call(Plain.spawn_child),
        "segment": group.on(0).call(Holding.segment)[0],
    }
    pending = group.start(Plain.sleep, 300)
    print(json.dumps(facts), flush=True)
    pending.result(300)


if __name__ == "__main__":
    print("starting", flush=True)
    if sys.argv[1] == "with":
        with Cluster(num_devices=2) as cluster:
            work(cluster)
    elif sys.argv[1] == "forked":
        with (
            started_template(["numpy"], thread_env(1)) as template,
            Cluster(num_devices=2, template=template) as cluster,
        ):
            work(cluster)
    elif sys.argv[1] == "without":
        work(Cluster(num_devices=2))
    elif sys.argv[1] == "local":
        cluster = Cluster("local")
        print(json.dumps({"session": cluster.session, "guard": cluster._session.guard.pid}), flush=True)
        time.sleep(300)
