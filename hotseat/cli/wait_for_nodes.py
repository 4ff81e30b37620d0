"""`python -m hotseat.cli.wait_for_nodes N`: waits for the nodes of the Ray cluster at RAY_ADDRESS. Scripts call it."""

import sys

from hotseat.cli.ending import reported
from hotseat.cluster.on_ray.waiting import wait_for_nodes

if __name__ == "__main__":
    sys.exit(reported("hotseat", lambda: wait_for_nodes(int(sys.argv[1]))))
