"""A push that went wrong in any way is noticed before anything is sampled, and the tensor is named."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hotseat.algorithms.digest import tensor_digest
from hotseat.errors import WeightError
from hotseat.rollout import TransformersEngine
from hotseat.weights.bucket import HostData
from hotseat.weights.transfer import Receiver, Sender, check_digests


def make_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=17,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
            tie_word_embeddings=True,
        )
    )


@pytest.fixture
def trainer() -> LlamaForCausalLM:
    return make_model(1)


@pytest.fixture
def engine():
    made = TransformersEngine(make_model(0), max_length=16, num_slots=2, num_threads=1)
    yield made
    made.close()


def digests(model) -> dict[str, int]:
    return {name: tensor_digest(weight.detach()) for name, weight in model.named_parameters()}


def buckets_of(trainer, version=1, bucket_bytes=2048):
    return pack(trainer.named_parameters(), version, bucket_bytes)


def pack(named, version=1, bucket_bytes=1024):
    """Every bucket, each with a copy of its bytes: the sender uses its memory again."""
    sender = Sender(lambda: iter(named), bucket_bytes=bucket_bytes)
    sender.begin(version)
    found = []
    while sender.pack_next() is not None:
        bucket = sender.packed()
        found.append(replace(bucket, data=HostData(bucket.data.array.copy())))
    return found


def push(engine, buckets, version=1) -> dict[str, int]:
    receiver = Receiver(engine.load_bucket, engine.digest, engine.begin_load, engine.finish_load)
    receiver.begin(version)
    for bucket in buckets:
        receiver.take(bucket)
    return receiver.finish(version)


def test_buckets_hold_every_tensor_bit_for_bit_in_order(trainer):
    buckets = buckets_of(trainer)
    assert len(buckets) > 2
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    found = [pair for bucket in buckets for pair in bucket]
    for (name, tensor), (found_name, found_tensor) in zip(trainer.named_parameters(), found, strict=True):
        assert found_name == name
        assert torch.equal(found_tensor, tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_buckets_keep_the_dtype(dtype):
    tensor = torch.arange(7).to(dtype)
    [bucket] = pack([("a", tensor), ("b", tensor[:0]), ("c", tensor[3])])
    unpacked = dict(bucket)
    assert torch.equal(unpacked["a"], tensor)
    assert unpacked["a"].dtype == dtype
    assert unpacked["b"].shape == (0,)
    assert unpacked["c"].shape == ()
    assert unpacked["c"] == 3


def test_tensors_of_several_types_begin_where_a_view_of_any_type_may():
    """Three bytes, two and eight in a row would leave the latter where torch makes no view of their type."""
    named = [
        ("bytes", torch.arange(3, dtype=torch.uint8)),
        ("half", torch.arange(3).bfloat16()),
        ("double", torch.arange(3).double()),
        ("float", torch.arange(3).float()),
    ]
    [bucket] = pack(named)
    assert [entry.start % 64 for entry in bucket.entries] == [0] * 4
    assert {name: tensor.tolist() for name, tensor in bucket} == {name: [0, 1, 2] for name, _ in named}
    assert [tensor.dtype for _, tensor in bucket] == [tensor.dtype for _, tensor in named]


def test_a_transposed_tensor_arrives_as_it_reads():
    tensor = torch.arange(6.0).view(2, 3).t()
    [bucket] = pack([("a", tensor)])
    assert torch.equal(dict(bucket)["a"], tensor)


def test_a_bucket_lasts_while_the_next_is_packed():
    sender = Sender(lambda: iter([(f"w{i}", torch.full((4,), float(i))) for i in range(3)]), bucket_bytes=16)
    sender.begin(1)
    assert sender.pack_next() == 16
    first = sender.packed()
    assert sender.pack_next() == 16
    assert dict(first)["w0"].tolist() == [0.0] * 4
    assert dict(sender.packed())["w1"].tolist() == [1.0] * 4
    assert sender.pack_next() == 16
    assert sender.pack_next() is None


def test_the_memory_of_one_push_is_used_by_the_next():
    sender = Sender(lambda: iter([("w", torch.ones(4))]))
    pointers = []
    for version in range(4):
        sender.begin(version)
        sender.pack_next()
        pointers.append(dict(sender.packed())["w"].data_ptr())
        sender.finish()
    assert pointers[:2] == pointers[2:]


def test_a_tensor_above_the_bucket_size_has_a_bucket_of_its_own():
    named = [("small", torch.ones(2)), ("large", torch.ones(100)), ("last", torch.ones(2))]
    assert [[e.name for e in b.entries] for b in pack(named, bucket_bytes=64)] == [["small"], ["large"], ["last"]]


def test_a_bucket_is_a_copy_of_the_moment_it_was_packed():
    buffer = torch.zeros(3)

    def reuse():
        for value in (1.0, 2.0):
            buffer.fill_(value)
            yield f"w{value:.0f}", buffer

    [bucket] = pack(reuse())
    assert {name: tensor.tolist() for name, tensor in bucket} == {"w1": [1.0] * 3, "w2": [2.0] * 3}


def test_read_only_bytes_unpack_without_a_warning(trainer):
    bucket = buckets_of(trainer)[0]
    bucket.data.array.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dict(bucket)


def test_a_whole_push_arrives_and_the_engine_scores_as_the_trainer(trainer, engine):
    check_digests(1, digests(trainer), push(engine, buckets_of(trainer)), "engine 0")
    assert engine.version == 1
    prompt = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    log_probs = trainer(prompt).logits[0, :-1].log_softmax(-1).gather(1, prompt[0, 1:, None])[:, 0]
    expected = [[0.0, *log_probs.tolist()]]
    assert engine.score(prompt.tolist())[0] == pytest.approx(expected[0], abs=1e-5)


def test_a_dropped_bucket_is_noticed(trainer, engine):
    first, dropped, *rest = buckets_of(trainer)
    with pytest.raises(WeightError, match=r"bucket 2 \(.*\) arrived where bucket 1 was due"):
        push(engine, [first, *rest])
    assert dropped.index == 1


def test_a_dropped_last_bucket_is_named(trainer, engine):
    *most, last = buckets_of(trainer)
    with pytest.raises(WeightError, match=last.entries[0].name.replace(".", r"\.")):
        push(engine, most)


def test_reordered_buckets_are_noticed(trainer, engine):
    first, second, *rest = buckets_of(trainer)
    with pytest.raises(WeightError, match="bucket 1 .* arrived where bucket 0 was due"):
        push(engine, [second, first, *rest])


def test_a_bucket_of_another_version_is_noticed(trainer, engine):
    first, second, *rest = buckets_of(trainer)
    with pytest.raises(WeightError, match="push of version 1: bucket 1 .* is of version 7"):
        push(engine, [first, replace(second, version=7), *rest])


def test_a_push_cannot_be_finished_as_another(trainer, engine):
    receiver = Receiver(engine.load_bucket, engine.digest, engine.begin_load, engine.finish_load)
    receiver.begin(1)
    with pytest.raises(WeightError, match="push of version 1 cannot be finished as version 2"):
        receiver.finish(2)


def test_one_flipped_bit_is_noticed_and_the_tensor_named(trainer, engine):
    buckets = buckets_of(trainer)
    entry = buckets[1].entries[0]
    data = np.array(buckets[1].data.array)
    data[entry.start + 1] ^= 1
    buckets[1] = replace(buckets[1], data=HostData(data))
    with pytest.raises(WeightError, match=rf"engine 0 serves other values of {entry.name} .*1 of"):
        check_digests(1, digests(trainer), push(engine, buckets), "engine 0")


class Forgetful:
    """An engine that takes a push and goes on serving what it had."""

    def __init__(self, engine):
        self._engine = engine

    def begin_load(self, version):
        pass

    def load_bucket(self, named_tensors):
        list(named_tensors)

    def finish_load(self):
        pass

    def digest(self, names=None):
        return self._engine.digest(names)


def test_a_push_that_arrived_and_was_not_loaded_is_noticed(trainer, engine):
    live = push(Forgetful(engine), buckets_of(trainer))
    with pytest.raises(WeightError, match=r"serves other values of model\.embed_tokens\.weight .*more of \d+ tensors"):
        check_digests(1, digests(trainer), live, "engine 0")


def test_a_tensor_the_engine_does_not_have_is_named():
    with pytest.raises(WeightError, match=r"engine 2 has no b after the push of version 5 \(1 of 2 tensors\)"):
        check_digests(5, {"a": 1, "b": 2}, {"a": 1}, "engine 2")
