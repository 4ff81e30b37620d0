"""How the policy's weights reach the engines: in buckets, versioned, and checked on arrival."""

from hotseat.weights.bucket import Bucket, Entry, make_buckets, unpack
from hotseat.weights.push import Receiver, Sender, check_canary, check_digests

__all__ = ["Bucket", "Entry", "Receiver", "Sender", "check_canary", "check_digests", "make_buckets", "unpack"]
