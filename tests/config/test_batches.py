"""The batch algebra, with numbers worked by hand."""

import pytest

from hotseat.config import loads
from hotseat.config.batches import batch_algebra, explain, left_over_note, nearest_divisors, nearest_multiples
from hotseat.errors import BatchError

HYBRID = """
rollout: {batch_size: 1024, samples_per_prompt: 4, micro_batch_size: 8, max_new_tokens: 1024}
train: {batch_size: 128, micro_batch_size: 4}
data: {max_samples: 20000, prompt_max_length: 1024, max_length: 2048}
"""


def test_the_hybrid_engine_command_adds_up():
    algebra = batch_algebra(loads(HYBRID), num_ranks=8)
    assert algebra.samples_per_step == 4096  # 1024 x 4
    assert algebra.optimizer_steps_per_step == 32  # 4096 / 128
    assert algebra.train_micro_batches == 4  # 128 / (8 x 4)
    assert algebra.score_micro_batches == 64  # 4096 / (8 x 8)
    assert algebra.tokens_per_step == 4096 * 2048
    assert algebra.num_steps == 19  # 20000 // 1024
    assert algebra.num_dropped_rows == 544  # 20000 - 19 x 1024
    assert algebra.schedule_length == 608  # 19 x 32
    assert algebra.warmup_steps == 19  # 3 % of 608 is 18.24, rounded up


def test_the_tail_of_a_pass_joins_the_next():
    algebra = batch_algebra(loads(HYBRID + "\n").model_copy(), 8)
    twice = batch_algebra(loads(HYBRID.replace("micro_batch_size: 4}", "micro_batch_size: 4, num_episodes: 2}")), 8)
    assert algebra.num_steps == 19
    assert twice.num_steps == 39  # 40000 // 1024: one more than 2 x 19
    assert twice.num_dropped_rows == 64


def test_epochs_over_a_rollout_multiply_its_optimizer_steps():
    text = HYBRID.replace("micro_batch_size: 4}", "micro_batch_size: 4, max_epochs: 3}")
    assert batch_algebra(loads(text), 8).optimizer_steps_per_step == 96


def test_supervised_training_takes_one_optimizer_step_per_batch():
    algebra = batch_algebra(loads("task: dpo\ntrain: {batch_size: 256, micro_batch_size: 2, max_epochs: 2}"), 8, 1000)
    assert (algebra.num_steps, algebra.num_dropped_rows, algebra.optimizer_steps_per_step) == (7, 208, 1)
    assert algebra.train_micro_batches == 16
    assert algebra.tokens_per_step == 256 * 2 * 2048
    assert algebra.score_micro_batches is None


def test_all_sizes_that_do_not_divide_are_named_with_the_nearest_that_do():
    """Scenario 39."""
    text = "rollout: {batch_size: 100, samples_per_prompt: 3}\ntrain: {batch_size: 128, micro_batch_size: 5}"
    with pytest.raises(BatchError) as caught:
        batch_algebra(loads(text), 8)
    assert str(caught.value).splitlines() == [
        "batch sizes do not divide:",
        "  train.batch_size 128 does not divide the 300 samples of a step (rollout.batch_size 100 x"
        " rollout.samples_per_prompt 3): set it to 100 or 150",
        "  train.batch_size 128 is not a multiple of 8 ranks x train.micro_batch_size 5 = 40: set it to 120 or 160,"
        " or train.micro_batch_size to 4 or 8",
    ]


def test_a_token_budget_still_needs_samples_for_every_rank():
    text = "rollout: {batch_size: 10}\ntrain: {batch_size: 10, max_tokens_per_device: 4096}"
    with pytest.raises(BatchError, match="10 does not divide over 4 ranks: set it to 8 or 12"):
        batch_algebra(loads(text), 4)
    assert batch_algebra(loads(text), 5).train_micro_batches is None


def test_fewer_rows_than_one_step_are_refused_once_counted():
    with pytest.raises(BatchError, match=r"100 rows in 1 pass are fewer than the 1024 of one step"):
        batch_algebra(loads(HYBRID), 8, num_rows=100)


def test_nearest_sizes():
    assert nearest_multiples(100, 32) == "96 or 128"
    assert nearest_multiples(10, 32) == "32"
    assert nearest_divisors(5, 16) == "4 or 8"
    assert nearest_divisors(99, 16) == "16"


def test_the_explanation_shows_numbers_and_where_they_come_from():
    config = loads(HYBRID)
    rows = explain(batch_algebra(config, 8), config)
    assert ("samples per step", "4,096", "1,024 prompts x 4") in rows
    assert ("micro-batches per rank", "4", "128 / (8 ranks x 4)") in rows
    assert ("steps", "19", "at most 20,000 rows x 1 pass / 1,024, 544 left over and not used") in rows


def test_the_explanation_says_what_it_cannot_know():
    config = loads("train: {max_tokens_per_device: 9999}\nrollout: {max_tokens_per_device: 2999}")
    rows = {what: (number, how) for what, number, how in explain(batch_algebra(config, 1), config)}
    assert rows["steps"] == ("unknown", "set data.max_samples, or give --num-rows, to know")
    assert rows["micro-batches per rank"] == ("varies", "at most 9,999 tokens each")
    assert rows["log-prob micro-batches per rank"] == ("varies", "at most 2,999 tokens each")


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (
            "rollout: {batch_size: 3, samples_per_prompt: 4}\ntrain: {batch_size: 12, num_episodes: 2}",
            "not used: the last 1 prompt of the 16 of 2 passes, too few for a step of 3; a rollout.batch_size that"
            " divides 16, such as 2 or 4, uses all",
        ),
        (
            "rollout: {batch_size: 3}\ntrain: {batch_size: 3}\nalgorithm: {filtering: {enabled: true}}",
            "not used, unless they replace filtered ones: the last 2 prompts of the 8 of 1 pass, too few for a step of"
            " 3; a rollout.batch_size that divides 8, such as 2 or 4, uses all",
        ),
        (
            "task: sft\ntrain: {batch_size: 3}",
            "not used: the last 2 rows of the 8 of 1 pass, too few for a step of 3; a train.batch_size that divides 8,"
            " such as 2 or 4, uses all",
        ),
        ("task: sft\ntrain: {batch_size: 4}", None),
    ],
)
def test_rows_that_make_no_whole_step_are_noted(text, note):
    config = loads(text)
    assert left_over_note(batch_algebra(config, 1, num_rows=8), config) == note
