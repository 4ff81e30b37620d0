"""Tensors on devices inside items of channels: they stay on the device, and handles travel.

`pack` copies an item's CUDA tensors into device memory of their own, so that the item is what it was when it was
put, waits for that copy, and sends handles of it beside the pickle of the rest. `unpack_all` maps that memory where
this process has the same device (by UUID), copies it into tensors of its own, waits for the copy, and unmaps it. Where
it has not, the bytes come through host memory. A tensor arrives on the same device if the receiver sees it, else on the
receiver's current CUDA device, else on the CPU; contiguous, unless it was dense in another order of dimensions, which
it keeps.

With such an item goes a token: one end of a pair of sockets, whose other end the sender has. It is a descriptor, so the
system itself keeps count of it: as long as the broker or the receiver has it, the sender keeps the memory, and the
moment that nobody has it any more - copied, dropped, or killed - the sender hears the end of the stream and frees the
memory. The token also says what became of the sender. Asked through it, the sender answers with the bytes in host
memory, and it does so unasked before it leaves the channel or exits. If it is killed, the stream ends without them, and
`unpack_all` raises `WorkerError`, also where that happens during the copy.

Items of less than 1 MiB on devices go through host memory, where they are faster, and so do items that would have this
process keep more than a 16th of a device's memory, or more than 256 of them.
"""

from __future__ import annotations

from hotseat.rlinf.device_items.keeper import move_to_host, num_kept
from hotseat.rlinf.device_items.pickling import pack, unpack_all, use

__all__ = ["move_to_host", "num_kept", "pack", "unpack_all", "use"]
