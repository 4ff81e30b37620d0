"""The other end of a channel in the tests: `python queue_peer.py WHAT FILE`, the channel pickled in the file."""

import pickle
import sys
import time
from pathlib import Path

what, path = sys.argv[1:3]
channel = pickle.loads(Path(path).read_bytes())
print("ready", flush=True)
if what == "consume":
    count = 0
    while channel.get(timeout_s=300) is not None:
        count += 1
    print(count, flush=True)
elif what == "take one and wait":
    print(channel.get(timeout_s=300), flush=True)
    time.sleep(600)
elif what == "put one and wait":
    channel.put(1, timeout_s=300)
    print("put", flush=True)
    time.sleep(600)
elif what == "put large and wait":
    channel.put(b"x" * (1 << 20), timeout_s=300)
    print("put", flush=True)
    time.sleep(600)
elif what == "put one, leave and wait":
    channel.put(1, timeout_s=300)
    channel.leave()
    print("put", flush=True)
    time.sleep(600)
elif what == "wait":
    try:
        channel.get(timeout_s=300)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
