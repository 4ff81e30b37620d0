"""Which way weights take: the table of `hotseat/weights/transports.py`, row by row."""

import pytest

from hotseat.errors import UserError
from hotseat.weights.broadcast import BroadcastGroup
from hotseat.weights.transports import choose_transports

ACTOR = [(0,), (1,)]


@pytest.mark.parametrize(
    ("is_cuda", "setting", "engine", "transport", "backend"),
    [
        (False, "auto", (0,), "host", None),
        (False, "auto", (5,), "host", None),
        (False, "auto", (), "host", None),
        (False, "gloo", (0,), "host", None),
        (False, "gloo", (5,), "broadcast", "gloo"),
        (False, "gloo", (), "broadcast", "gloo"),
        (True, "auto", (1,), "ipc", None),
        (True, "auto", (0, 1), "ipc", None),
        (True, "auto", (1, 2), "broadcast", "nccl"),
        (True, "auto", (5,), "broadcast", "nccl"),
        (True, "auto", (), "host", None),
        (True, "nccl", (0,), "ipc", None),
        (True, "nccl", (5,), "broadcast", "nccl"),
        (True, "nccl", (), "host", None),
        (True, "gloo", (0,), "ipc", None),
        (True, "gloo", (5,), "broadcast", "gloo"),
        (True, "gloo", (), "broadcast", "gloo"),
    ],
)
def test_every_row_of_the_table(is_cuda, setting, engine, transport, backend):
    transports = choose_transports(ACTOR, [engine], is_cuda, setting)
    assert transports.engines == (transport,)
    broadcast_group = transports.broadcast_group()
    assert (broadcast_group.backend if broadcast_group is not None else None) == backend


def test_nccl_without_cuda_is_refused():
    with pytest.raises(UserError, match="rollout.weight_transport is nccl, .* set it to auto, or to gloo"):
        choose_transports(ACTOR, [(0,)], False, "nccl")


def test_a_mixture_reads_from_the_ranks_that_are_there_and_numbers_the_others():
    transports = choose_transports([(0,), (1,), (2,)], [(4, 5), (1, 2), (6,), (2,)], is_cuda=True)
    assert transports.engines == ("broadcast", "ipc", "broadcast", "ipc")
    assert transports.sources == (1, 2)
    assert transports.first_ranks == (1, 0, 3, 0)
    assert transports.receivers == ("engine 0 worker 0", "engine 0 worker 1", "engine 2")
    assert transports.broadcast_group(2, "10.0.0.1", 7.0) == BroadcastGroup(
        transports.receivers, "nccl", "10.0.0.1", 2, 7.0
    )
