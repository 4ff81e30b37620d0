"""Ranks, as a launcher starts them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def meeting(num_ranks: int) -> Iterator[list[dict[str, str]]]:
    """What each rank has to find in its environment. Until all have ended: this process listens where they meet.

    It does so before they start. A port that is only chosen may be another's when the first rank has loaded torch.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # no rank listens itself
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    yield [{**common, "RANK": str(rank)} for rank in range(num_ranks)]
