"""Policies that act in numbers: their tokens, and their log-probs against torch's own distributions."""

import json

import numpy as np
import pytest
import torch
from torch.distributions import Normal

from hotseat.errors import UnsupportedError
from hotseat.model_source import ModelSource
from hotseat.numeric.float_tokens import FloatTokens, ids_of, tensor_of, values_of
from hotseat.numeric.models import NumericConfig, NumericPolicy, NumericValue, write_policy
from hotseat.train.backend import LoraOptions, TrainOptions
from hotseat.train.make import make_backend
from hotseat.types import MicroBatch

CONFIG = NumericConfig(state_dim=3, action_dim=2, num_actions=2, hidden_sizes=[8])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy")
    write_policy(path, CONFIG, seed=1)
    return path


def batch_of(*lengths: int) -> tuple[MicroBatch, torch.Tensor]:
    """Segments of so many steps, 3 numbers read and 4 sampled in each; and all steps, [n, 7]."""
    steps = torch.randn(sum(lengths), 7, generator=torch.Generator().manual_seed(0))
    ids = [torch.from_numpy(ids_of(part.reshape(-1).numpy())) for part in steps.split(list(lengths))]
    masks = [torch.tensor([False] * 3 + [True] * 4).repeat(length) for length in lengths]
    return MicroBatch.from_segments(ids, masks, [str(length) for length in lengths]), steps


def test_a_number_survives_as_a_token_bit_for_bit():
    values = np.array([0.0, -0.0, 1.5, -3.4e38, 1e-45, np.inf, -np.inf], dtype=np.float32)
    ids = ids_of(values)
    assert ids.min() >= 0
    assert ids.max() < 2**32
    assert ids[2] == 0x3FC00000  # 1.5 in IEEE 754
    assert values_of(ids).tobytes() == values.tobytes()
    assert tensor_of(torch.from_numpy(ids)).numpy().tobytes() == values.tobytes()


def test_actions_are_carried_out_within_bounds():
    tokens = FloatTokens(np.array([-1.0, 0.0]), np.array([1.0, 2.0]))
    assert tokens.decode(ids_of(np.array([0.5, 3.0, -7.0, 1.0])).tolist()).tolist() == [[0.5, 2.0], [-1.0, 1.0]]


def test_the_tokenizer_writes_numbers_and_reads_them(folder):
    tokenizer = ModelSource(str(folder)).tokenizer()
    assert tokenizer("1.5 -2")["input_ids"] == ids_of(np.array([1.5, -2.0])).tolist()
    assert tokenizer.decode(ids_of(np.array([1.5, -2.0])).tolist()).split() == ["1.5", "-2"]


@pytest.mark.parametrize("temperature", [1.0, 0.25])
def test_log_probs_and_entropy_are_those_of_a_normal_distribution(folder, temperature):
    batch, steps = batch_of(3, 1)
    backend = make_backend(ModelSource(str(folder)), TrainOptions())
    policy = NumericPolicy.from_pretrained(folder)
    normal = Normal(policy(steps[:, :3])[0], torch.exp(policy.log_std) * temperature**0.5)
    expected = torch.zeros(4, 7)
    expected[:, 3:] = normal.log_prob(steps[:, 3:]).detach()
    torch.testing.assert_close(backend.log_probs([batch], temperature)[0], expected.reshape(-1))
    asked = []

    class Loss:
        needs_entropy = True

        def __call__(self, outputs, micro_batch):
            asked.append(outputs.entropy.detach())
            return outputs.log_probs.sum(), {}

    backend.update([batch], Loss(), temperature)
    entropy = torch.zeros(4, 7)
    entropy[:, 3:] = normal.entropy().detach()
    torch.testing.assert_close(asked[0], entropy.reshape(-1))


def test_a_value_is_that_of_the_state_before_it(folder):
    batch, steps = batch_of(2, 2)
    backend = make_backend(ModelSource(str(folder)), TrainOptions(head="value"))
    value = NumericValue(CONFIG)
    value.load_state_dict(dict(backend.weights()))
    expected = torch.zeros(4, 7)
    expected[:, 3:] = value(steps[:, :3]).detach()[:, None]
    torch.testing.assert_close(backend.values([batch])[0], expected.reshape(-1))


def test_new_weights_depend_on_the_seed_alone(folder, tmp_path):
    write_policy(tmp_path / "same", CONFIG, seed=1)
    write_policy(tmp_path / "other", CONFIG, seed=2)
    read = [(path / "model.safetensors").read_bytes() for path in (folder, tmp_path / "same", tmp_path / "other")]
    assert read[0] == read[1] != read[2]
    assert json.loads((folder / "config.json").read_text())["state_dim"] == 3


def test_options_of_language_models_are_refused(folder):
    with pytest.raises(UnsupportedError, match=r"train\.lora: this is for language models"):
        make_backend(ModelSource(str(folder)), TrainOptions(lora=LoraOptions(4)))
