"""A cure that is tried: from where to where, and whether it helped, on records made by hand."""

import json
from dataclasses import replace

import pytest
from test_diagnosis import BREAKS, COLLAPSED, FLAT, NUM_STEPS, RISES, recorded

from hotseat.cli.main import main
from hotseat.observe.diagnosis import diagnose
from hotseat.observe.diagnosis.trial import NoWindow, Window, last_good_step, outcome_of, window_of
from hotseat.observe.recorded import MetricCurve


def broken(**metrics):
    """A run whose updates break it: the reward of step 6 is 0, and answers are cut from there on."""
    return recorded(reward=BREAKS, truncated=[*5 * [0.0], *15 * [0.9]], length=[*5 * [3], *15 * [8]], **metrics)


def window(run, *checkpoints, max_steps=30):
    ending, causes = diagnose(run)
    return window_of(run, ending, causes[0] if causes else None, checkpoints, max_steps)


def test_a_trial_begins_with_the_newest_checkpoint_before_the_update_that_did_harm():
    """The samples of step 5 or 6 show what an update before them did, that of step 4 at the earliest: 3 is good."""
    run = broken()
    ending, causes = diagnose(run)
    assert (causes[0].rule.name, causes[0].signs.began) == ("learning-rate", 5)
    assert last_good_step(run, ending, causes[0]) == 3
    assert window(run, 2, 3, 4, 6).start == 3
    assert window(run, 2, 5).start == 2
    assert window(run).start == 0


def test_samples_that_are_behind_move_the_beginning_back():
    run = broken(staleness_max=NUM_STEPS * [1])
    ending, causes = diagnose(run)
    assert last_good_step(run, ending, causes[0]) == 2


def test_a_trial_ends_where_the_rules_see_the_harm_in_the_record():
    run = broken()
    chosen = window(run, 3)
    seen = [
        step for step in range(4, 9) if "learning-rate" in {each.rule.name for each in diagnose(run.until(step))[1]}
    ]
    assert (seen, chosen.end, chosen.has_goal) == ([6, 7, 8], 8, False)


def test_a_trial_goes_on_to_the_next_evaluation_if_that_is_near():
    run = broken(eval__accuracy=[0.5, 0.6, 0, 0, 0])
    assert (window(run, 3).end, window(run, 3).has_goal) == (10, True)


def test_without_a_checkpoint_before_the_harm_it_says_which_settings_keep_one():
    run = broken()
    late = replace(
        run,
        curves={
            name: MetricCurve(tuple(step + 100 for step in curve.steps), curve.raw)
            for name, curve in run.curves.items()
        },
    )
    with pytest.raises(
        NoWindow, match=r"of step 103 or earlier, is there: the oldest one left is of step 118"
    ) as error:
        window(late, 118, 120)
    assert "Next time checkpoint.every=15 and checkpoint.keep_last=8 keep one" in str(error.value)
    with pytest.raises(NoWindow, match="none is left"):
        window(late)
    with pytest.raises(NoWindow, match="steps after the checkpoint of step 50: allow them by --steps"):
        window(late, 50)


def test_a_record_without_rewards_has_nothing_to_compare_with():
    run = recorded(failed_shares={3: 0.2}, reasons={"failed": "the reward is nan"})
    with pytest.raises(NoWindow, match="shows no harm at any step by its metrics"):
        window(run)


def test_a_setting_that_prevents_the_fall_has_helped():
    run = broken()
    chosen = window(run, 3)
    [cause, *_] = diagnose(run)[1]
    better = recorded(reward=RISES, truncated=NUM_STEPS * [0.0], length=NUM_STEPS * [3])
    outcome = outcome_of(run, better, chosen, cause, is_replay=False)
    assert outcome.has_helped
    assert (outcome.symptom, outcome.new_causes) == ("gone", ())
    figures = {each.name: each for each in outcome.figures}
    assert (figures["reward"].before, figures["reward"].recorded) == (0.3, 0.0)
    assert figures["truncated"].recorded == 0.9
    assert figures["truncated"].tried == 0.0


@pytest.mark.parametrize(("reward", "helped"), [(0.0, False), (0.19, False), (0.2, True)])
def test_half_of_a_fall_has_to_be_made_good(reward, helped):
    """From 0.4, the peak of the smoothed curve, to 0: half is 0.2."""
    run = broken()
    chosen = window(run, 3)
    tried = recorded(reward=[*BREAKS[:5], *15 * [reward]], truncated=NUM_STEPS * [0.0], length=NUM_STEPS * [3])
    assert outcome_of(run, tried, chosen, diagnose(run)[1][0], is_replay=False).has_helped is helped


def test_a_cause_that_is_still_there_and_one_that_is_new_are_named():
    run = broken()
    [cause, *_] = diagnose(run)[1]
    chosen = Window(4, NUM_STEPS, diagnose(run)[0], has_goal=False)
    assert outcome_of(run, run, chosen, cause, is_replay=False).symptom == "there"
    alike = recorded(reward=NUM_STEPS * [0.2], reward_std=NUM_STEPS * [0])
    assert "constant-reward" in outcome_of(run, alike, chosen, cause, is_replay=False).new_causes


def test_a_replay_is_not_judged_by_the_samples_of_the_record():
    run = broken(eval__accuracy=[0.5, 0.6, 0, 0, 0], kl=NUM_STEPS * [0.1])
    chosen = window(run, 3)
    [cause, *_] = diagnose(run)[1]
    tried = broken(eval__accuracy=[0.5, 0.6, 0.6, 0.6, 0.6], kl=NUM_STEPS * [0.2])
    outcome = outcome_of(run, tried, chosen, cause, is_replay=True)
    assert [each.name for each in outcome.figures] == ["eval/accuracy", "kl"]
    assert outcome.has_helped
    assert outcome.symptom is None  # the rule reads rewards


def test_a_run_that_never_rose_has_to_gain():
    run = COLLAPSED["truncation"]
    chosen = window(run)
    assert chosen.start == 0
    cause = diagnose(run)[1][0]
    for reward, helped in ((0.25, False), (0.4, True)):
        tried = recorded(reward=NUM_STEPS * [reward], truncated=NUM_STEPS * [0.0], length=NUM_STEPS * [8])
        assert outcome_of(run, tried, chosen, cause, is_replay=False).has_helped is helped


def run_of(path, settings, **metrics):
    """Write the records of a run that nothing can be tried with."""
    path.mkdir()
    (path / "config.yaml").write_text(f"task: rl\nactor: {{model: m}}\ndata: {{path: d}}\n{settings}")
    steps = [{"step": step, **{name: values[step] for name, values in metrics.items()}} for step in range(NUM_STEPS)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    return str(path)


def test_what_cannot_be_tried_is_refused_before_anything_is_loaded(tmp_path, capsys):
    healthy = run_of(tmp_path / "healthy", "", reward=RISES)
    constant = run_of(tmp_path / "constant", "reward: {function: r.py}", reward=FLAT, reward_std=NUM_STEPS * [0])
    late = run_of(
        tmp_path / "late",
        "",
        reward=[*15 * [0.5], *5 * [0.0]],
        truncated=[*15 * [0.0], *5 * [0.9]],
        length=[*15 * [3], *5 * [8]],
    )
    for words, said in (
        ([healthy, "--try"], "there is nothing to try a cure for: reward rose: 0.16 to 0.8, and no rule fires"),
        (
            [constant, "--try"],
            "only you can know the new value (reward.function: r.py -> one that tells answers apart)",
        ),
        ([constant, "--try", "rollout.temperatur=1"], "did you mean rollout.temperature?"),
        (
            [late, "--try", "--steps", "4"],
            "no checkpoint before the harm, of step 12 or earlier, is there: none is left",
        ),
        ([late, "--try", "--steps", "0"], "--steps 0: give at least 1"),
        ([healthy, "--steps", "4"], "--steps is for a trial: add --try"),
    ):
        assert main(["diagnose", *words]) == 2
        assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["constant", "healthy", "late"]
