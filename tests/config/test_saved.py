"""Configs that a run has written mean the same when they are read again, whatever the defaults are by then."""

import pytest

from hotseat.config import loads, loads_saved, to_saved
from hotseat.config.saved import MARK, SECOND


@pytest.mark.parametrize("text", ["", "algorithm: {policy_loss: gspo}", "{task: sft, train: {micro_batch_size: 2}}"])
def test_what_is_saved_is_read_as_it_was(text):
    config = loads(text)
    assert loads_saved(to_saved(config)) == config


def test_a_config_of_the_first_format_has_the_defaults_of_its_time():
    config = loads_saved("algorithm: {policy_loss: gspo, kl: {coef: 0.1, as_loss: true}}\n")
    assert (config.train.micro_batch_size, config.rollout.micro_batch_size) == (4, 16)
    assert config.algorithm.aggregation == "token_mean"
    assert config.algorithm.kl.estimator == "k1"
    assert config.algorithm.kl.allow_k1_loss


def test_what_the_first_format_says_itself_stays():
    text = "{train: {max_tokens_per_device: 4096}, rollout: {micro_batch_size: 2}, algorithm: {aggregation: constant}}"
    config = loads_saved(text)
    assert config == loads(text, ["data.max_lost_fraction=1", "train.dtype=bf16"])


@pytest.mark.parametrize("task", ["sft", "rm"])
def test_other_tasks_of_the_first_format_get_nothing_of_rl(task):
    first = f"{{task: {task}, train: {{micro_batch_size: 4, dtype: bf16}}, data: {{max_lost_fraction: 1.0}}}}"
    assert loads_saved(f"task: {task}\n") == loads(first)


@pytest.mark.parametrize("mark", ["", SECOND])
def test_runs_from_before_went_on_whatever_was_lost(mark):
    assert loads_saved(f"{mark}seed: 3\n").data.max_lost_fraction == 1.0
    assert loads_saved(f"{MARK}seed: 3\n").data.max_lost_fraction == 0.05


@pytest.mark.parametrize("mark", ["", SECOND])
def test_runs_from_before_computed_in_bf16_where_nothing_was_set(mark):
    assert loads_saved(f"{mark}seed: 3\n").train.dtype == "bf16"
    assert loads_saved(f"{mark}train: {{dtype: fp32}}\n").train.dtype == "fp32"
    assert loads_saved(f"{MARK}seed: 3\n").train.dtype is None


def test_overrides_stand_above_old_defaults():
    assert loads_saved("", ["train.micro_batch_size=auto"]).train.micro_batch_size == "auto"
