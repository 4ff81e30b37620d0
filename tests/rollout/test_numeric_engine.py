"""The engine of policies that act in numbers."""

import dataclasses

import numpy as np
import pytest
import torch

from hotseat.errors import NonFiniteError, UserError, WeightError
from hotseat.numeric.float_tokens import ids_of, values_of
from hotseat.numeric.models import NumericConfig, NumericPolicy
from hotseat.placement.role_names import Part
from hotseat.rollout.numeric_engine import NumericEngine
from hotseat.types import Request, Sampling

CONFIG = NumericConfig(state_dim=3, action_dim=2, num_actions=2, hidden_sizes=[8])


def policy(seed: int = 0) -> NumericPolicy:
    torch.manual_seed(seed)
    return NumericPolicy(CONFIG)


@pytest.fixture
def engine():
    made = NumericEngine(policy(), max_length=8, num_slots=32)
    yield made
    made.close()


def requests(count: int, temperature: float = 1.0) -> list[Request]:
    states = np.random.default_rng(0).normal(size=(count, 3))
    return [
        Request(f"{at}", tuple(ids_of(state).tolist()), Sampling(4, temperature), seed=at + 7)
        for at, state in enumerate(states)
    ]


def test_a_completion_does_not_depend_on_what_else_is_asked(engine):
    together = engine.generate(requests(70))
    alone = [engine.generate([request])[0] for request in requests(70)[::7]]
    assert [dataclasses.replace(each) for each in together[::7]] == alone


def test_samples_follow_the_policy_and_their_log_probs_are_scored_alike(engine):
    request = requests(1)[0]
    many = [dataclasses.replace(request, id=str(seed), seed=seed) for seed in range(4000)]
    answers = engine.generate(many)
    actions = np.stack([values_of(answer.token_ids) for answer in answers])
    with torch.no_grad():
        mean, log_std = policy()(torch.from_numpy(values_of([request.token_ids])))
    # Deviation 1: a mean of 4,000 is within 5/63 of its own, and so is their deviation, but for a chance of 1e-5.
    assert np.abs(actions.mean(0) - mean[0].numpy()).max() < 0.08
    assert np.abs(actions.std(0) - np.exp(log_std.detach().numpy())).max() < 0.08
    scores = engine.score([[*request.token_ids, *answer.token_ids] for answer in answers[:20]])
    assert [each[3:] for each in scores] == [pytest.approx(answer.log_probs, abs=1e-5) for answer in answers[:20]]


def test_greedy_requests_get_the_mean(engine):
    [answer] = engine.generate(requests(1, temperature=0.0))
    with torch.no_grad():
        mean = policy()(torch.from_numpy(values_of([requests(1)[0].token_ids])))[0]
    np.testing.assert_allclose(values_of(answer.token_ids), mean[0].numpy(), atol=1e-6)
    assert answer.log_probs == pytest.approx([-0.9189385] * 4)  # −½ log 2π


def test_weights_are_replaced_proved_and_offloaded(engine):
    before = engine.generate(requests(2))
    other = policy(1)
    engine.load_weights([(name, weight.detach()) for name, weight in other.named_parameters()], version=5)
    after = engine.generate(requests(2))
    assert after[0].versions == (5,) * 4
    assert after[0].token_ids != before[0].token_ids
    digests = engine.digest()
    assert set(digests) == {name for name, _ in other.named_parameters()}
    engine.offload([Part.WEIGHTS, Part.KV_CACHE])
    assert engine.health().resident_bytes[Part.WEIGHTS] == 0
    engine.onload([Part.WEIGHTS, Part.KV_CACHE])
    assert engine.generate(requests(2)) == after
    with pytest.raises(WeightError):
        engine.load_weights([("mean.bias", torch.zeros(4))], version=6)


def test_requests_of_another_form_are_refused(engine):
    with pytest.raises(UserError, match="reads 3 and samples 4"):
        engine.submit(dataclasses.replace(requests(1)[0], token_ids=(0, 0)))


def test_weights_that_are_not_finite_are_an_error_of_the_request():
    broken = policy()
    with torch.no_grad():
        broken.mean.bias.fill_(float("nan"))
    engine = NumericEngine(broken, max_length=8)
    try:
        with pytest.raises(NonFiniteError, match="not finite"):
            engine.generate(requests(1))
    finally:
        engine.close()
