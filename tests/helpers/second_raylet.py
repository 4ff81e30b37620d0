"""A second node of a Ray cluster, on this machine: `python second_raylet.py GCS_ADDRESS [NUM_GPUS TEMP_DIR]`.

What `ray start --address` does; that command refuses clusters that live on loopback. Ends with its standard input.
"""

import sys

from ray._private.node import Node
from ray._private.parameter import RayParams

node = Node(
    RayParams(
        gcs_address=sys.argv[1],
        node_ip_address="127.0.0.1",
        node_name="second",
        num_cpus=1,
        num_gpus=int(sys.argv[2]) if len(sys.argv) > 2 else 3,
        temp_dir=sys.argv[3] if len(sys.argv) > 3 else None,
        object_store_memory=100 << 20,
        node_manager_port=0,
        include_log_monitor=False,
        min_worker_port=0,
        max_worker_port=0,
    ),
    head=False,
    shutdown_at_exit=True,
    spawn_reaper=True,
)
print("up", flush=True)
sys.stdin.read()
