"""OpenRLHF's names beside ours, where they mean the same."""

import pytest

from hotseat.config import loads
from hotseat.observe.tracker_sink import renaming
from hotseat.openrlhf.metric_aliases import with_openrlhf_names


def added(text: str, values: dict[str, float]) -> dict[str, float]:
    """What trackers get besides the metrics themselves, at step 7."""
    found = dict(renaming(loads(text))(7, values))
    assert {name: found.pop(name) for name in values} == values
    return found


def test_rl():
    values = {"loss": 0.1, "kl": 0.2, "reward": 0.5, "length": 30.0, "learning_rate": 1e-6, "time/update": 3.0}
    assert added("task: rl", values) == {
        "train/policy_loss": 0.1,
        "train/kl": 0.2,
        "train/reward": 0.5,
        "train/response_length": 30.0,
        "train/actor_lr": 1e-6,
        "train/global_step": 7,
    }


def test_held_out_rewards_are_called_pass1_by_data_set():
    values = {"eval/reward": 0.5, "eval/gsm8k/reward": 0.25, "eval/gsm8k/pass@4": 0.75}
    assert added("task: rl", values) == {"eval/eval_gsm8k_pass1": 0.25, "eval/global_step": 7}


@pytest.mark.parametrize(
    "text",
    [
        "algorithm: {kl: {coef: 0.1, as_loss: true, estimator: k3}}",
        "algorithm: {entropy_coef: 0.01}",
        "algorithm: {aux_loss_coef: 0.01}",
    ],
)
def test_a_loss_with_further_terms_is_not_openrlhfs_policy_loss(text):
    assert added(text, {"loss": 0.1, "reward": 1.0}) == {"train/reward": 1.0, "train/global_step": 7}


def test_supervised_tasks():
    assert added("task: sft", {"loss": 2.0, "eval/loss": 3.0, "learning_rate": 1e-5}) == {
        "train/gpt_loss": 2.0,
        "eval/eval gpt_loss": 3.0,
        "train/lr": 1e-5,
        "train/global_step": 7,
        "eval/global_step": 7,
    }
    pairs = {"loss": 0.6, "accuracy": 0.8, "chosen_reward": 1.0, "rejected_reward": -1.0, "eval/accuracy": 0.7}
    for task in ("rm", "dpo"):
        assert added(f"task: {task}", pairs) == {
            "train/loss": 0.6,
            "train/acc": 0.8,
            "train/chosen_reward": 1.0,
            "train/reject_reward": -1.0,
            "eval/acc_mean": 0.7,
            "train/global_step": 7,
            "eval/global_step": 7,
        }
    with_nll = added("task: dpo\nalgorithm: {dpo: {nll_coef: 0.1}}", {"loss": 0.6, "chosen_nll": 1.5})
    assert with_nll == {"train/nll_loss": 1.5, "train/global_step": 7}


def test_they_can_be_switched_off_and_nothing_is_made_up():
    assert added("log: {openrlhf_names: false}", {"loss": 0.1}) == {}
    assert with_openrlhf_names("rl", 7, {"memory/x": 1.0}, is_plain_loss=True) == {"memory/x": 1.0}
