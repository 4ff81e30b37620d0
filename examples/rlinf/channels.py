"""Channels with keys and weights in RLinf's API: python examples/rlinf/channels.py"""

import asyncio

from hotseat.rlinf import Channel, Cluster, PackedPlacementStrategy, Worker


class Producer(Worker):
    def produce(self, channel):
        channel.put("an object")
        channel.put("another, asynchronously", async_op=True).wait()

        async def put():
            await channel.put("a third, with asyncio", async_op=True).async_wait()

        asyncio.run(put())
        for length in (3, 1, 4, 2):
            channel.put([0] * length, weight=length, key="samples")
        channel.put("for worker 1", key=1)
        channel.put("for worker 0", key=0)


class Consumer(Worker):
    def consume(self, channel):
        if self._rank == 1:
            return channel.get(key=1)
        first = channel.get()
        second = channel.get(async_op=True).wait()

        async def get():
            return await channel.get(async_op=True).async_wait()

        third = asyncio.run(get())
        # Items of weight 3, 1, 4, 2: at most 5 together, in their order.
        batches = [channel.get_batch(target_weight=5, key="samples"), channel.get_batch(target_weight=6, key="samples")]
        return [first, second, third], [[len(item) for item in batch] for batch in batches], channel.get(key=0)

    def consume_by_name(self, name):
        channel = self.connect_channel(name)
        channel.put(f"rank {self._rank} was here")
        return channel.maxsize()


if __name__ == "__main__":
    cluster = Cluster(num_nodes=1, num_devices=8)  # 8 logical devices: this needs no GPU
    channel = Channel.create(name="channel")
    producer = Producer.create_group().launch(
        cluster, name="producer", placement_strategy=PackedPlacementStrategy(start_hardware_rank=0, end_hardware_rank=0)
    )
    consumers = Consumer.create_group().launch(
        cluster, name="consumer", placement_strategy=PackedPlacementStrategy(start_hardware_rank=0, end_hardware_rank=1)
    )
    produced = producer.produce(channel)
    consumed = consumers.consume(channel).wait()
    produced.wait()
    print(consumed)

    bounded = Channel.create(name="bounded", maxsize=2)
    sizes = consumers.consume_by_name("bounded").wait()
    is_full = bounded.full()
    try:
        bounded.put_nowait("one too many")
        refused = False
    except asyncio.QueueFull:
        refused = True
    guests = sorted([bounded.get(), bounded.get()])
    print(sizes, is_full, refused, guests, bounded.qsize(), bounded.empty())
