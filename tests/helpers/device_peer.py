"""The other end of a channel with tensors: `python device_peer.py FOLDER UUID FILE ORDERS`.

The channel is pickled in the file. It obeys the lines of the pipe ORDERS, and answers each with a line.
"""

import os
import pickle
import sys
import time
from pathlib import Path

import torch
from file_devices import FileDevices

from hotseat.rlinf import device_items

folder, uuid, path, orders = sys.argv[1:5]
devices = FileDevices(Path(folder), uuid)
device_items.use(devices)
device_items.pickling.MIN_ON_DEVICE = 0
channel = pickle.loads(Path(path).read_bytes())


def obey(order: str) -> object:
    if order.startswith("put "):
        tensor = torch.full((3, 4), float(order.removeprefix("put ")), dtype=torch.float64)
        channel.put({"tensor": tensor, "other": 7}, timeout_s=300)
        tensor.zero_()  # the item is what it was
        return "put"
    if order == "get":
        try:
            tensor = channel.get(timeout_s=300)["tensor"]
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.sum().item()} mapped {devices.num_mapped}"
    if order == "get and hang in the copy":
        devices.at_map = lambda: (print("copies", flush=True), time.sleep(600))
        channel.get(timeout_s=300)
    if order == "fork":
        child = os.fork()
        if child == 0:
            time.sleep(600)
            os._exit(0)
        return child
    if order == "copying fails":
        device_items.keeper._host_copy = lambda blocks: 1 / 0
        return "so be it"
    if order == "num kept":
        return device_items.num_kept()
    if order == "hang up":  # in good order, but what it has put stays on the device
        return channel.link.hang_up()
    return getattr(channel, order)()  # leave


print("ready", flush=True)
with open(orders) as lines:
    for line in lines:
        print(obey(line.rstrip("\n")), flush=True)
