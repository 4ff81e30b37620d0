"""How the policy's weights reach the engines: in buckets, versioned, and checked on arrival.

Three lanes (`lanes` says which an engine has): `host` memory, `device_ipc` on a device that trainer and engine share,
`broadcast` to other devices.
"""

from hotseat.weights.broadcast import LOOPBACK, TIMEOUT_S, Audience, BroadcastData
from hotseat.weights.bucket import Bucket, Data, Entry
from hotseat.weights.device_ipc import merge
from hotseat.weights.lanes import Lane, Lanes, choose_lanes
from hotseat.weights.push import BUCKET_BYTES, Receiver, Sender, check_digests

__all__ = [
    "BUCKET_BYTES",
    "LOOPBACK",
    "TIMEOUT_S",
    "Audience",
    "BroadcastData",
    "Bucket",
    "Data",
    "Entry",
    "Lane",
    "Lanes",
    "Receiver",
    "Sender",
    "check_digests",
    "choose_lanes",
    "merge",
]
