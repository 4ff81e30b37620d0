"""A driver on an existing cluster of two nodes: `python driver_on_existing.py WHAT`.

`once`: works, prints its facts as JSON, and closes its cluster.
`run`: the same, then works again and waits to be killed, with other facts.
`observe`: prints what others have left.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from cluster_workers import Plain

from hotseat.cluster import Cluster, Process, WorkerGroup
from hotseat.rlinf.queues import QueueDirectory


class Where(Plain):
    def where(self) -> dict:
        import ray

        return {
            "node": ray.get_runtime_context().get_node_id(),
            "devices": os.environ["CUDA_VISIBLE_DEVICES"],
            "rank": os.environ["RANK"],
            "local_rank": os.environ["LOCAL_RANK"],
            "nccl": {key: value for key, value in os.environ.items() if key.startswith("NCCL_")},
        }


def work(cluster: Cluster) -> dict:
    actor_at = [Process(0, 0, (1,))]
    rollout_at = [Process(0, 1, (4, 2)), Process(1, 0, (1,))]
    cluster.reserve([*actor_at, *rollout_at])
    actor = cluster.launch("actor", Where, processes=actor_at)
    rollout = cluster.launch("rollout", Where, processes=rollout_at)
    numbers = {}
    for node in (0, 1):  # the queue is here, then there
        channel = QueueDirectory.of_node(cluster, node, 600.0).open("numbers", 4)
        pending = rollout.on(0).start(Plain.produce, channel, 20)
        numbers[node] = actor.within(60).call(Plain.consume, channel, 20)[0]
        pending.result(60)
    return {
        "pid": os.getpid(),
        "waiting": waiting(rollout),
        "session": cluster.session,
        "nodes": [[node.rank, node.num_devices] for node in cluster.nodes],
        "node_ids": [node.id for node in cluster._runtime._connection.nodes],
        "actor": actor.call(Where.where),
        "rollout": rollout.call(Where.where),
        "numbers": numbers,
        "alive": rollout.alive(),
        "children": rollout.call(Plain.spawn_child),
        "workers": [*actor.pids(), *rollout.pids()],
    }


def waiting(group: WorkerGroup) -> list[str]:
    """Let a process wait, look at it from here, and return what it was doing and its stack."""
    with tempfile.TemporaryDirectory() as folder:
        begun, until = Path(folder) / "begun", Path(folder) / "until"
        pending = group.on(0).start(Plain.wait_for_file, str(begun), str(until))
        while not begun.exists():
            time.sleep(0.01)
        seen = group.look(0, with_stack=True)
        until.touch()
        pending.result(600)
    return [*map(str, seen.doing), seen.stack]


def observe() -> dict:
    import ray
    from ray._private.state import actors
    from ray.util import placement_group_table

    ray.init(logging_level="error")
    until = time.monotonic() + 120
    while True:
        left = {
            "actors": [actor["ActorClassName"] for actor in actors().values() if actor["State"] != "DEAD"],
            "reserved": [g["state"] for g in placement_group_table().values() if g["state"] != "REMOVED"],
        }
        if not any(left.values()) or time.monotonic() > until:
            return {**left, "nodes": sum(node["Alive"] for node in ray.nodes())}
        time.sleep(0.2)


if __name__ == "__main__":
    if sys.argv[1] == "observe":
        print(json.dumps(observe()), flush=True)
    else:
        with Cluster() as cluster:
            print(json.dumps(work(cluster)), flush=True)
        if sys.argv[1] == "once":
            sys.exit()
        cluster = Cluster()
        group = cluster.launch("again", Plain, processes=[Process(0, 0, (1,)), Process(1, 1, (2,))])
        facts = {"session": cluster.session, "children": group.call(Plain.spawn_child), "workers": group.pids()}
        facts["nodes"] = [[node.rank, node.num_devices] for node in cluster.nodes]
        print(json.dumps(facts), flush=True)
        time.sleep(300)
