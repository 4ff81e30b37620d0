"""Transfer of the policy's weights to the engines: in buckets, versioned, and checked on arrival.

Three transports (`transports` chooses one for each engine): `host_memory`, `device_ipc` on a device that trainer and
engine share, `broadcast` to other devices.
"""

from hotseat.weights.broadcast import LOOPBACK, TIMEOUT_S, BroadcastData, BroadcastGroup
from hotseat.weights.bucket import Bucket
from hotseat.weights.device_ipc import merge
from hotseat.weights.transfer import BUCKET_BYTES, Receiver, Sender, check_digests
from hotseat.weights.transports import Transport, TransportPlan, check_transport, choose_transports

__all__ = [
    "BUCKET_BYTES",
    "LOOPBACK",
    "TIMEOUT_S",
    "BroadcastData",
    "BroadcastGroup",
    "Bucket",
    "Receiver",
    "Sender",
    "Transport",
    "TransportPlan",
    "check_digests",
    "check_transport",
    "choose_transports",
    "merge",
]
