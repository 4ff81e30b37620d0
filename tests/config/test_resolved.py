"""What the maths of a run is where options are left unset, and what the run notes about it."""

import pytest

from hotseat.algorithms.kl import AdaptiveKl
from hotseat.config import loads
from hotseat.config.resolved import (
    aggregation,
    correction_kind,
    kl_estimator,
    max_sampled_tokens,
    resolved_notes,
    shortest_kl_horizon,
)
from hotseat.errors import UserError


@pytest.mark.parametrize(
    ("algorithm", "used"),
    [
        ("{}", "token_mean"),
        ("{policy_loss: gspo}", "sequence_mean"),
        ("{policy_loss: cispo}", "token_mean"),
        ("{estimator: dr_grpo}", "constant"),
        ("{policy_loss: gspo, estimator: dr_grpo}", "sequence_mean"),
        ("{policy_loss: gspo, aggregation: token_mean}", "token_mean"),
        ("{aggregation: constant}", "constant"),
    ],
)
def test_an_unset_aggregation_is_that_of_the_losss_paper(algorithm, used):
    assert aggregation(loads(f"algorithm: {algorithm}")) == used


@pytest.mark.parametrize(
    ("algorithm", "note"),
    [
        ("{policy_loss: gspo, aggregation: token_mean}", "token_mean; gspo's own is sequence_mean"),
        ("{estimator: dr_grpo, aggregation: token_mean}", "token_mean; dr_grpo's own is constant"),
        ("{estimator: dr_grpo, policy_loss: gspo, aggregation: constant}", "constant; gspo's own is sequence_mean"),
        ("{aggregation: sequence_mean}", "sequence_mean; ppo's own is token_mean"),
    ],
)
def test_another_aggregation_than_the_losss_own_is_noted(algorithm, note):
    [found] = resolved_notes(loads(f"algorithm: {algorithm}"))
    assert note in found


@pytest.mark.parametrize(
    ("text", "used"),
    [
        ("rollout: {engine: vllm}", "none"),
        ("rollout: {engine: vllm, quantization: fp8}", "tis"),
        ("rollout: {engine: vllm, kv_cache_dtype: fp8}", "tis"),
        ("rollout: {engine: vllm, quantization: fp8}\nalgorithm: {policy_loss: gspo}", "rollout-ratio"),
        ("rollout: {engine: vllm, quantization: fp8}\nalgorithm: {correction: {kind: icepop}}", "icepop"),
    ],
)
def test_samples_in_fp8_are_corrected_unless_it_is_set_otherwise(text, used):
    assert correction_kind(loads(text)) == used
    assert resolved_notes(loads(text)) == []


def test_samples_in_fp8_without_a_correction_are_noted():
    [note] = resolved_notes(loads("rollout: {engine: vllm, quantization: fp8}\nalgorithm: {correction: {kind: none}}"))
    assert note.startswith("warning: engines sample in FP8 and algorithm.correction.kind is none: samples are learned")


def test_a_lower_bound_of_cispos_weights_is_noted():
    [note] = resolved_notes(loads("algorithm: {policy_loss: cispo}"))
    assert note.startswith("algorithm.clip_low is 0.2: cispo's weights are at least 0.8; the paper's have no lower")
    assert resolved_notes(loads("algorithm: {policy_loss: cispo, clip_low: 1, clip_high: 3}")) == []


def test_cispo_with_dr_grpo_says_that_it_divides_by_a_constant():
    config = loads("algorithm: {policy_loss: cispo, estimator: dr_grpo, clip_low: 1}")
    assert aggregation(config) == "constant"
    [note] = resolved_notes(config)
    assert note == (
        "algorithm.aggregation is unset and constant, which is that of algorithm.estimator dr_grpo with any policy_loss"
        " but gspo and gmpo; cispo's paper has token_mean: set algorithm.aggregation to choose another"
    )
    chosen = loads("algorithm: {policy_loss: cispo, estimator: dr_grpo, clip_low: 1, aggregation: constant}")
    assert resolved_notes(chosen) == []


def test_a_run_that_follows_the_papers_has_nothing_to_note():
    for algorithm in ("{}", "{policy_loss: gspo}", "{estimator: dr_grpo}", "{policy_loss: gspo, aggregation: null}"):
        assert resolved_notes(loads(f"algorithm: {algorithm}")) == []
    assert resolved_notes(loads("task: sft")) == []


@pytest.mark.parametrize(
    ("kl", "used"),
    [
        ("{coef: 0.1}", "k1"),
        ("{coef: 0.1, as_loss: true}", "k2"),
        ("{coef: 0.1, as_loss: true, estimator: k3}", "k3"),
        ("{coef: 0.1, estimator: k3}", "k3"),
    ],
)
def test_an_unset_kl_estimator_is_one_that_regularises(kl, used):
    config = loads(f"algorithm: {{kl: {kl}}}")
    assert kl_estimator(config) == used
    assert resolved_notes(config) == []


def test_k1_as_a_loss_is_warned_of():
    config = loads("algorithm: {kl: {coef: 0.1, as_loss: true, estimator: k1, allow_k1_loss: true}}")
    [note] = resolved_notes(config)
    assert note.startswith("warning: algorithm.kl.estimator is k1 as a loss, whose gradient is zero on average")


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("rollout: {max_new_tokens: 20}", 20),
        ("data: {max_length: 100}", 50),  # half is left beside the longest prompt
        ("rollout: {max_new_tokens: 20}\nagent: {path: a.py, max_steps: 4}\ndata: {max_length: 200}", 80),
        ("rollout: {max_new_tokens: 20}\nagent: {path: a.py, max_steps: 4}\ndata: {max_length: 60}", 59),
        (
            "rollout: {max_new_tokens: 20}\nagent: {path: a.py, max_steps: 4}\n"
            "data: {max_length: 100, prompt_max_length: 40}",
            60,
        ),
        ("rollout: {max_new_tokens: 20}\nagent: {path: a.py}\ndata: {max_length: 200, prompt_max_length: 50}", 150),
        ("agent: {path: a.py, max_steps: 4}\ndata: {max_length: 200}", 100),
    ],
)
def test_the_limit_of_an_episode_is_that_of_all_its_turns(text, limit):
    assert max_sampled_tokens(loads(text)) == limit


def test_the_shortest_kl_horizon_is_where_the_controller_begins_to_work():
    config = loads("rollout: {batch_size: 4, samples_per_prompt: 8}")
    shortest = shortest_kl_horizon(config)
    assert shortest == pytest.approx(0.2 * 32)
    assert AdaptiveKl(0.1, target=1.0, horizon=shortest + 1e-3).updated(0.0, 32).coefficient > 0
    with pytest.raises(UserError, match="too short for 32 samples"):
        AdaptiveKl(0.1, target=1.0, horizon=shortest).updated(0.0, 32)


def test_the_limit_of_an_agents_episode_is_noted_where_it_is_used():
    agent = "agent: {path: a.py, max_steps: 4}\nrollout: {max_new_tokens: 20}\n"
    assert resolved_notes(loads(agent)) == []
    [note] = resolved_notes(loads(agent + "reward: {overlong: {buffer_length: 8}}"))
    assert note.startswith("an episode may sample 80 tokens over all of its turns")
    [note] = resolved_notes(loads(agent + "algorithm: {estimator: dr_grpo}"))
    assert note.startswith("an episode may sample 80 tokens")
