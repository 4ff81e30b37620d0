"""The other end of a channel in the tests: `python channel_peer.py WHAT FILE`, the channel pickled in the file."""

import pickle
import sys
import time
from pathlib import Path

import hotseat.cluster.channel
from hotseat.cluster import ChannelClosed

hotseat.cluster.channel._BROKER_GRACE_S = 60.0
what, path = sys.argv[1:3]
channel = pickle.loads(Path(path).read_bytes())
print("ready", flush=True)
if what == "consume":
    count = 0
    try:
        while True:
            channel.get(timeout_s=20)
            count += 1
    except ChannelClosed:
        print(count, flush=True)
elif what == "take one and wait":
    print(channel.get(timeout_s=20), flush=True)
    time.sleep(60)
elif what == "put one and wait":
    channel.put(1, timeout_s=20)
    print("put", flush=True)
    time.sleep(60)
elif what == "put one, close and wait":
    channel.put(1, timeout_s=20)
    channel.close()
    print("put", flush=True)
    time.sleep(60)
elif what == "wait":
    try:
        channel.get(timeout_s=20)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
