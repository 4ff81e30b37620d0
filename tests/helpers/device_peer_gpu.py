"""The other end of channels with CUDA tensors: `python device_peer_gpu.py FILE`, two channels pickled in the file.

It obeys the lines of its standard input, and answers each with a line.
"""

import pickle
import sys
from pathlib import Path

import torch

from hotseat.rlinf import device_items
from hotseat.rlinf.device_items.cuda import CudaDevices


class Counting(CudaDevices):
    num_mapped = 0

    def map(self, uuid, handle):
        mapped = super().map(uuid, handle)
        self.num_mapped += mapped is not None
        return mapped


devices = Counting()
device_items.use(devices)
there, back = pickle.loads(Path(sys.argv[1]).read_bytes())


def obey(order: str) -> object:
    if order == "get":
        tensor = there.get(timeout_s=60)
        return f"{tensor.device} {tensor.sum(dtype=torch.float64).item():.0f} mapped {devices.num_mapped}"
    if order == "echo":
        item = there.get(timeout_s=60)
        assert item["nested"][0]["a"].device.type == "cuda"
        assert item["cpu"].device.type == "cpu"
        back.put(item, timeout_s=60)
        return f"mapped {devices.num_mapped}"
    if order.startswith("put "):
        tensor = torch.full((int(order.removeprefix("put ")) << 20,), 3, dtype=torch.uint8, device="cuda")
        back.put(tensor, timeout_s=60)
        return f"put, {device_items.num_kept()} kept"
    if order == "empty cache":
        torch.cuda.empty_cache()
        return device_items.num_kept()
    return back.link.hang_up()  # in good order, but what it has put stays on the device


torch.zeros(1, device="cuda")
print("ready", flush=True)
for line in sys.stdin:
    print(obey(line.rstrip("\n")), flush=True)
