"""Weights that stay on the device: a trainer's process and engines' processes on one GPU, and NCCL between two."""

import pickle

import pytest
import torch
from transport_cases import engines, push, weights

from hotseat.algorithms.digest import named_digests
from hotseat.cuda_ipc import device_uuid
from hotseat.errors import WeightError
from hotseat.weights.broadcast import BroadcastGroup
from hotseat.weights.device_ipc import SharedData
from hotseat.weights.transfer import Sender

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(named):
    return [(name, tensor.cuda()) for name, tensor in named]


def test_two_engines_read_the_senders_memory_push_after_push():
    named = on_gpu(weights(0))
    sender = Sender(lambda: iter(named), "cuda", bucket_bytes=8192)
    with engines(2, "cuda:0") as made:
        for version in range(1, 5):
            named = on_gpu(weights(version))
            push(sender, made, version, "ipc")
            assert [engine.call("finish", version) for engine in made] == [named_digests(named)] * 2


def test_a_block_that_grows_is_mapped_anew():
    named = on_gpu(weights(1))
    sender = Sender(lambda: iter(named), "cuda", bucket_bytes=1 << 20)
    with engines(1, "cuda:0") as made:
        for version, size in enumerate((1 << 10, 20 << 20, 60 << 20, 5 << 20), 1):  # up to 240 MB; blocks begin with 64
            named = [*on_gpu(weights(version)), ("large", torch.randn(size, device="cuda"))]
            push(sender, made, version, "ipc")
            assert made[0].call("finish", version) == named_digests(named)


def test_an_engine_in_place_of_a_dead_one_maps_the_same_memory():
    named = on_gpu(weights(2))
    sender = Sender(lambda: iter(named), "cuda", bucket_bytes=8192)
    with engines(1, "cuda:0") as first:
        push(sender, first, 1, "ipc")
        first[0].process.kill()
        first[0].process.join(10)
    with engines(1, "cuda:0") as second:
        push(sender, second, 1, "ipc")
        assert second[0].call("finish", 1) == named_digests(named)


def test_only_names_travel():
    named = [("w", torch.randn(1 << 24, device="cuda"))]
    sender = Sender(lambda: iter(named), "cuda")
    sender.begin(1)
    sender.pack_next()
    assert len(pickle.dumps(sender.packed("ipc"))) < 4096


def test_within_one_process_the_senders_own_memory_is_read():
    named = on_gpu(weights(3))
    sender = Sender(lambda: iter(named), "cuda")
    sender.begin(1)
    sender.pack_next()
    assert named_digests(pickle.loads(pickle.dumps(sender.packed("ipc")))) == named_digests(named)


def test_host_and_gloo_transports_take_device_memory_too():
    named = on_gpu(weights(4))
    sender = Sender(lambda: iter(named), "cuda", bucket_bytes=8192)
    with engines(1, "cuda:0") as made:
        push(sender, made, 1, "host")
        assert made[0].call("finish", 1) == named_digests(named)
        push(sender, made, 2, "broadcast", BroadcastGroup(("engine 0",), "gloo", timeout_s=60.0))
        assert made[0].call("finish", 2) == named_digests(named)
    sender.close()


def test_a_device_without_a_trainer_is_named():
    here = device_uuid(torch.cuda.current_device())
    with pytest.raises(WeightError, match=f"no trainer rank is on this process's device {here}: .* on elsewhere"):
        SharedData(0, {"elsewhere": None}).open()


def test_three_gigabytes_pass_at_the_speed_of_memory(capsys):
    named = [(f"w{i}", torch.randn(8960, 1536, device="cuda", dtype=torch.bfloat16)) for i in range(110)]
    num_bytes = sum(tensor.nbytes for _, tensor in named)
    sender = Sender(lambda: iter(named), "cuda")
    with engines(1, "cuda:0") as made:
        seconds = [push(sender, made, version, "ipc") for version in range(1, 5)]
        assert made[0].call("finish", 4) == named_digests(named)
    with capsys.disabled():
        told = ", ".join(f"{s * 1e3:.0f}" for s in seconds)
        print(f"\n{num_bytes / 1e9:.2f} GB by IPC, push by push: {told} ms")
    assert min(seconds) < 0.5


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_nccl_brings_the_same_bits_to_another_device():
    named = on_gpu(weights(5))
    sender = Sender(lambda: iter(named), "cuda:0", bucket_bytes=8192)
    broadcast_group = BroadcastGroup(("engine 0",), "nccl", timeout_s=60.0)
    with engines(1, "cuda:1") as made:
        for version in range(1, 4):
            named = on_gpu(weights(version))
            push(sender, made, version, "broadcast", broadcast_group)
            assert made[0].call("finish", version) == named_digests(named)
    sender.close()
