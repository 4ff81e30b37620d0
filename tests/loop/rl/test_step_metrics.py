"""Alarms: what is out of the ordinary, said once and not for ever."""

from dataclasses import replace

from hotseat.loop.rl.collect import Collected
from hotseat.loop.rl.step_metrics import NUM_NEEDED, Alarms
from hotseat.loop.workers.group_facts import GroupFacts

FACTS = GroupFacts(
    epoch=0,
    prompt=7,
    source="",
    samples=(0, 1, 2),
    rewards=(0.0, 0.0, 9.0),
    scores=(0.0, 0.0, 9.0),
    num_sampled=(1, 1, 1),
    num_tokens=(2, 2, 2),
    truncated=(False,) * 3,
    failures=(),
)
COLLECTED = Collected((FACTS,), 1, (), 0)


def alarms(said: list[str], **options) -> Alarms:
    return Alarms(
        lambda text, kind: said.append(text),
        **{"has_groups": True, "spike_factor": 100.0, "on_spike": "warn"} | options,
    )


def numbers(norm: float = 1.0, alike: float = 0.0) -> dict[str, float]:
    return {"grad_norm": norm, "loss": 0.1, "groups_alike": alike}


def test_the_first_of_several_steps_without_a_learning_signal_is_warned_of():
    said: list[str] = []
    mine = alarms(said)
    for step, alike in enumerate([1.0, 1.0, 0.5, 1.0], 1):
        mine.look(step, numbers(alike=alike), COLLECTED)
    assert [text.split(":")[0] for text in said] == ["step 1", "step 4"]


def test_where_nothing_is_learned_because_labels_are_missing_a_hint_names_the_columns():
    said: list[str] = []
    alarms(said, hint=lambda: "hint: data.label_key is not set").look(1, numbers(alike=1.0), COLLECTED)
    assert said[0].endswith("difficulty of the prompts; hint: data.label_key is not set")


def test_where_samples_have_no_siblings_being_alike_means_nothing():
    said: list[str] = []
    alarms(said, has_groups=False).look(1, numbers(alike=1.0), COLLECTED)
    assert said == []


def test_a_reward_that_no_sample_has_is_warned_of_once():
    said: list[str] = []
    mine, collected = alarms(said, parts=("right", "rigth")), replace(FACTS, extra=({"right": 1.0}, {}, {"x": 0.0}))
    for step in (1, 2):
        mine.look(step, numbers(), Collected((collected,), 1, (), 0))
    assert said == [
        "step 1: no sample has the reward rigth, which is to be compared apart and adds nothing; they have right, x."
        " reward.parts names what is compared"
    ]


def test_a_spike_is_warned_of_with_its_samples_and_does_not_raise_the_median():
    said: list[str] = []
    mine = alarms(said)
    for step, norm in enumerate([1.0] * NUM_NEEDED + [500.0, 1.0, 500.0], 1):
        mine.look(step, numbers(norm), COLLECTED)
    assert len(said) == 2
    assert "500 times the usual 1" in said[1]
    assert "differ most from their siblings': 0/7/2, 0/7/0, 0/7/1" in said[1]


def test_several_spikes_in_a_row_become_the_new_normal():
    said: list[str] = []
    mine = alarms(said)
    for step, norm in enumerate([1.0] * 50 + [500.0] * 1000, 1):
        mine.look(step, numbers(norm), COLLECTED)
    assert len(said) == NUM_NEEDED


def test_an_engine_gap_beyond_the_canarys_limits_is_warned_of_once_and_stops_nothing():
    said: list[str] = []
    mine = alarms(said)
    gap = {"engine_gap_median": 0.3, "engine_gap_p90": 0.9, "engine_gap_mean": -0.1}
    for step, use in enumerate([0.4, 2.5, float("inf"), 0.9, 1.5], 1):
        mine.look(step, numbers() | gap | {"engine_gap_use": use}, COLLECTED)
    mine.look(6, numbers(), COLLECTED)  # nothing was learned, so nothing was measured
    assert [text.split(":")[0] for text in said] == ["step 2", "step 5"]
    assert "the median 0.3, the 90th percentile 0.9 and the mean -0.1, 2.5 times what the canary" in said[0]
