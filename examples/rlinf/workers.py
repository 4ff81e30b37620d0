"""Workers, groups and messages with RLinf's API: python examples/rlinf/workers.py

Written for RLinf, it would begin with `from rlinf.scheduler import Cluster, PackedPlacementStrategy, Worker`.
"""

import asyncio
import os

import torch

from hotseat.rlinf import Cluster, PackedPlacementStrategy, Worker

GREETERS, ANSWERERS = "greeters", "answerers"


class Adder(Worker):
    """One process per device; torch.distributed connects them by the variables that each process has."""

    def initialize(self):
        torch.distributed.init_process_group(backend="gloo")
        total = torch.ones(1, 1)
        torch.distributed.all_reduce(total)
        return total

    def hello(self):
        return self._rank, int(os.environ["WORLD_SIZE"])


class Greeter(Worker):
    def talk(self):
        self.send(f"hello from {self._rank}", dst_group_name=ANSWERERS, dst_rank=self._rank)
        reply = self.recv(src_group_name=ANSWERERS, src_rank=self._rank)
        after = (self._rank + 1) % self._world_size
        self.send([torch.full((2,), 1.0), torch.full((2,), 2.0)], ANSWERERS, after)
        self.send({"a": torch.tensor(3.0)}, ANSWERERS, after)
        self.send_tensor(torch.full((2, 1), 4.0), ANSWERERS, after)
        return reply

    def talk_async(self):
        after = (self._rank + 1) % self._world_size
        self.send(torch.ones(3, 1), ANSWERERS, after, async_op=True).wait()

        async def send():
            await self.send(torch.ones(4, 1), ANSWERERS, after, async_op=True).async_wait()

        asyncio.run(send())


class Answerer(Worker):
    def talk(self):
        heard = self.recv(src_group_name=GREETERS, src_rank=self._rank)
        self.send(f"{heard}, hello back", dst_group_name=GREETERS, dst_rank=self._rank)
        before = (self._rank - 1) % self._world_size
        values = self.recv(GREETERS, before)
        named = self.recv(GREETERS, before)
        in_place = torch.empty(2, 1)
        self.recv_tensor(in_place, GREETERS, before)
        return float(sum(value.sum() for value in values) + named["a"] + in_place.sum())

    def talk_async(self):
        before = (self._rank - 1) % self._world_size
        first = self.recv(GREETERS, before, async_op=True).wait()

        async def receive():
            return await self.recv(GREETERS, before, async_op=True).async_wait()

        return tuple(first.shape), tuple(asyncio.run(receive()).shape)


if __name__ == "__main__":
    cluster = Cluster(num_nodes=1, num_devices=8)  # 8 logical devices: this needs no GPU
    adders = Adder.create_group().launch(
        cluster, name="adders", placement_strategy=PackedPlacementStrategy(start_hardware_rank=0, end_hardware_rank=3)
    )
    totals = adders.initialize().wait()
    some = adders.execute_on(0, 3).hello().wait()
    print("all_reduce over 4 workers:", totals[0].item(), "- ranks 0 and 3:", some)

    pair = PackedPlacementStrategy(start_hardware_rank=4, end_hardware_rank=5)
    greeters = Greeter.create_group().launch(cluster, name=GREETERS, placement_strategy=pair)
    answerers = Answerer.create_group().launch(cluster, name=ANSWERERS, placement_strategy=pair)
    said = greeters.talk()
    sums = answerers.talk().wait()
    replies = said.wait()
    greeters.talk_async()
    shapes = answerers.talk_async().wait()
    print(replies, sums, shapes)
