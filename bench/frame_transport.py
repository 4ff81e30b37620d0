"""Milliseconds that the frames of a round take from simulators to an engine, on Ray, for several sizes of frames.

    python bench/frame_transport.py [--rounds 20] > bench/results/cpu_frame_transport.txt

A round is a frame of each of 64 simulators, of noise as that of cameras. "simulator" is the step of simulators that
cost nothing, in their child process: their frames cross to the process of the role env. "pack" makes frames of the form
that requests hold. "send" is a call with 64 requests from that process to the engine's, until it has them. "unpack"
makes tensors of them there. The driver takes no part.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hotseat.cluster import Cluster, WorkerGroup
from hotseat.data.frames import FramePreparer
from hotseat.envs.family_loading import SimulatorSettings
from hotseat.envs.processes import ProcessEnv
from hotseat.types import Request, Sampling
from hotseat.vision import tensors_of

FAMILY = str(Path(__file__).parent / "lib" / "camera.py")
NUM_ENVS = 64
SIZES = (64, 224, 448)


class Processor:
    """Stands for a model's processor: it scales bytes."""

    image_token = "<image>"

    def __call__(self, **arguments: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.zeros(1, 1, dtype=torch.int64), **self.image_processor(**arguments)}

    def image_processor(self, *, images: list[Any], **_: Any) -> dict[str, torch.Tensor]:
        pixels = np.stack([np.asarray(image) for image in images]).transpose(0, 3, 1, 2)
        return {"pixel_values": torch.from_numpy(pixels.astype(np.float32) / 255)}


class Engine:
    """Takes requests, and has tensors of their frames."""

    def submit(self, client: str, requests: list[Request]) -> float:
        started_s = time.perf_counter()
        assert all(tensors_of(request.images[0]) for request in requests)
        return time.perf_counter() - started_s


class Host:
    """Steps simulators, and sends what they show."""

    def measure(self, engine: WorkerGroup[Engine], pixels: int, num_rounds: int) -> dict[str, float]:
        preparer = FramePreparer(Processor())
        env = ProcessEnv(SimulatorSettings(FAMILY, (), None, {"pixels": pixels}), NUM_ENVS)
        slots = list(range(NUM_ENVS))
        env.reset(slots, [0] * NUM_ENVS, slots)
        spent: dict[str, list[float]] = {"simulator": [], "pack": [], "send": [], "unpack": []}

        def timed(name: str, work: Callable[[], Any]) -> Any:
            started_s = time.perf_counter()
            result = work()
            spent[name].append(time.perf_counter() - started_s)
            return result

        for turn in range(num_rounds + 2):
            seen = timed("simulator", lambda: env.step(slots, np.zeros((NUM_ENVS, 1, 1)))).seen
            images = timed("pack", lambda seen=seen: [preparer.prepare(each.image).image for each in seen])
            requests = [
                Request(f"{turn}/{slot}", (1, 2), Sampling(1), 0, images=(image,)) for slot, image in enumerate(images)
            ]
            [unpack_s] = timed("send", lambda requests=requests: engine.call(Engine.submit, "host", requests))
            spent["unpack"].append(unpack_s)
            spent["send"][-1] -= unpack_s
        env.close()
        return {name: min(seconds[2:]) * 1e3 for name, seconds in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    num_rounds = parser.parse_args().rounds
    print(f"{NUM_ENVS} frames, ms      simulator     pack     send   unpack      all", flush=True)
    with Cluster(num_devices=0, object_store_bytes=1 << 30) as cluster:
        host, engine = cluster.launch("host", Host), cluster.launch("engine", Engine)
        for pixels in SIZES:
            [spent] = host.call(Host.measure, engine, pixels, num_rounds)
            row = " ".join(f"{spent[name]:8.1f}" for name in ("simulator", "pack", "send", "unpack"))
            print(
                f"{pixels:4} x {pixels:<4} {NUM_ENVS * pixels**2 * 3 / 1e6:5.1f} MB  {row} {sum(spent.values()):8.1f}"
            )


if __name__ == "__main__":
    main()
