"""Why a run collapsed: each rule fires on records made by hand that show its cause, and on no healthy ones."""

import graphlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from doc_tables import with_table
from loop_cases import rl_yaml

from hotseat.cli.main import main
from hotseat.config import Config, loads, loads_saved
from hotseat.config.load import valid_keys
from hotseat.observe.diagnosis import RULES, diagnose, render_table, unexplained
from hotseat.observe.recorded import MetricCurve, Recorded, read_recorded

PAGE = Path(__file__).parents[2] / "docs" / "diagnosing.md"
NUM_STEPS = 20
RISES = [0.1 + 0.04 * step for step in range(NUM_STEPS)]
BREAKS = [0.1, 0.2, 0.3, 0.4, 0.5] + 15 * [0.0]
FLAT = NUM_STEPS * [0.2]
SETTINGS = "task: rl\nrollout: {batch_size: 16, samples_per_prompt: 8, max_new_tokens: 8}\n"
PASSES = {0: 1, 1: 6, 2: 11, 3: 16}


def recorded(settings="", *, passes=PASSES, failed_shares=None, reasons=None, counts=None, broken=None, **metrics):
    """Make a run's records. Metrics have a value for each step from 1 on; of evaluations, for each 5th from 0 on."""
    curves = {}
    for name, values in metrics.items():
        name, steps = name.replace("__", "/"), range(1, 1 + len(values))
        if name.startswith("eval/"):
            steps = range(0, 5 * len(values), 5)
        curves[name] = MetricCurve(tuple(steps), tuple(map(float, values)))
    return Recorded(
        curves,
        loads_saved(SETTINGS, settings.split()),
        (0.0, 1.0),
        passes,
        64,
        counts or {"trained": 2560},
        failed_shares or {},
        reasons or {},
        broken or {},
    )


COLLAPSED = {
    "failed-rewards": recorded(
        reward=RISES, failed_shares={3: 0.2, 7: 0.4}, reasons={"failed": "the reward is nan"}, counts={"failed": 77}
    ),
    "constant-reward": recorded(reward=FLAT, reward_std=NUM_STEPS * [0], groups_alike=NUM_STEPS * [1]),
    "groups-alike": recorded("rollout.temperature=0.1", reward=FLAT, groups_alike=NUM_STEPS * [0.9]),
    "truncation": recorded(
        reward=FLAT, truncated=NUM_STEPS * [0.9], length=NUM_STEPS * [8], groups_alike=[0.2, *19 * [0.9]]
    ),
    "length-reward": recorded(
        reward=RISES, length=range(2, 22), truncated=[*15 * [0], *5 * [0.6]], eval__accuracy=[0.5, 0.5, 0.2, 0, 0]
    ),
    "reward-hack": recorded(
        "eval.path=x eval.reward=y.py",
        reward=RISES,
        length=NUM_STEPS * [4],
        groups_alike=NUM_STEPS * [0.8],
        eval__accuracy=[0.5, 0.5, 0.2, 0, 0],
    ),
    "repeated-data": recorded(reward=RISES, eval__reward=[0.1, 0.2, 0.2, 0.1, 0.1]),
    "dropped-data": recorded(
        reward=FLAT,
        groups_dropped=NUM_STEPS * [50],
        counts={"trained": 100, "dropped": 300},
        reasons={"dropped": "the mean score 0 is not above 0"},
    ),
    "not-finite": recorded(reward=BREAKS, skipped_updates=[0, 0, *range(1, 19)], truncated=[*5 * [0], *15 * [1]]),
    "engine-gap": recorded("rollout.engine=vllm", reward=RISES, engine_gap_use=[*10 * [0.3], *10 * [2]]),
    "staleness": recorded(
        "overlap.staleness=8 overlap.in_flight=recompute algorithm.correction.kind=none",
        reward=BREAKS,
        staleness_max=[0, 1, *18 * [2]],
        engine_gap=[0, 0.2, *18 * [1.5]],
        length=[*5 * [2], *15 * [8]],
    ),
    "kl-penalty": recorded(
        "algorithm.kl.coef=20",
        reward=FLAT,
        kl=[0, *19 * [0.05]],
        kl_coefficient=NUM_STEPS * [20],
        length=NUM_STEPS * [2],
        group_reward_std=NUM_STEPS * [0.3],
    ),
    "entropy-bonus": recorded(
        "algorithm.entropy_coef=2", reward=BREAKS, entropy=[0.5, 0.6, 0.8, *17 * [4]], truncated=[*4 * [0], *16 * [1]]
    ),
    "large-updates": recorded(
        "train.batch_size=16", reward=BREAKS, clipped=[*5 * [0.4], *15 * [0]], length=[*5 * [2], *15 * [8]]
    ),
    "learning-rate": recorded(
        "actor.optimizer.learning_rate=0.2",
        reward=BREAKS,
        length=[*5 * [2], *15 * [8]],
        truncated=[*5 * [0], *15 * [1]],
        groups_alike=[*5 * [0.2], *15 * [1]],
        eval__accuracy=[0.1, 0, 0, 0, 0],
    ),
    "kl-growth": recorded(
        "algorithm.kl.coef=0.001",
        reward=FLAT,
        surprise=NUM_STEPS * [0.5],
        kl=[0.01 * step**2 for step in range(NUM_STEPS)],
    ),
    "entropy-collapse": recorded(
        reward=FLAT, entropy=[1, 0.5, 0.2, *17 * [0.05]], groups_alike=[*6 * [0.3], *14 * [0.9]]
    ),
    "critic": recorded("algorithm.estimator=gae", reward=FLAT, explained_variance=[*5 * [0.2], *15 * [-0.5]]),
}
HEALTHY = {
    "learns": recorded(reward=RISES, groups_alike=NUM_STEPS * [0.3], eval__accuracy=[0.1, 0.3, 0.6, 0.8, 0.8]),
    "is solved, with groups alike and no entropy left": recorded(
        reward=[*RISES[::4], *15 * [0.98]], groups_alike=[*5 * [0.3], *15 * [0.95]], entropy=[1, 0.5, *18 * [0.01]]
    ),
    "is noisy": recorded(reward=[value + 0.15 * (-1) ** step for step, value in enumerate(RISES)]),
    "learns from stale samples": recorded(
        reward=RISES, staleness_max=NUM_STEPS * [8], engine_gap=NUM_STEPS * [1.2], clipped=NUM_STEPS * [0.4]
    ),
    "has one spike": recorded(reward=RISES, grad_norm=[1 + 50 * (step == 9) for step in range(NUM_STEPS)]),
    "is cut at the limit and right": recorded(reward=RISES, truncated=NUM_STEPS * [1], length=NUM_STEPS * [1]),
    "grows longer as it should": recorded(
        reward=RISES, length=range(20, 40), truncated=NUM_STEPS * [0.1], eval__accuracy=[0.1, 0.3, 0.6, 0.8, 0.8]
    ),
    "holds what it had": recorded(reward=NUM_STEPS * [0.95], groups_alike=NUM_STEPS * [0.9]),
    "learns slowly": recorded(reward=[0.1 + 0.01 * step for step in range(NUM_STEPS)], groups_alike=NUM_STEPS * [0.3]),
    "has one answer to a prompt": recorded(
        "rollout.samples_per_prompt=1", reward=[0.6 + 0.1 * value for value in RISES], groups_alike=NUM_STEPS * [1]
    ),
    "has begun": recorded(reward=[0.2, 0.1]),
}
UNKNOWN = {
    "does not rise": recorded(reward=FLAT, groups_alike=NUM_STEPS * [0.3], length=NUM_STEPS * [3]),
    "falls": recorded(reward=[0.5, 0.5, 0.4, 0.2, *16 * [0.1]], length=NUM_STEPS * [3]),
    "falls where it is held out": recorded(reward=FLAT, eval__accuracy=[0.4, 0.1, 0, 0, 0]),
}


@pytest.mark.parametrize("name", RULES)
def test_each_cause_is_found_first(name):
    _, causes = diagnose(COLLAPSED[name])
    assert causes[0].rule.name == name
    signs = causes[0].signs
    assert signs.evidence
    assert 1 <= signs.began <= NUM_STEPS
    assert {change.option for change in signs.cure} <= set(valid_keys())


@pytest.mark.parametrize("name", HEALTHY)
def test_no_rule_fires_for_a_run_that(name):
    ending, causes = diagnose(HEALTHY[name])
    assert causes == []
    assert unexplained(HEALTHY[name], ending, causes) is None


@pytest.mark.parametrize("name", UNKNOWN)
def test_no_rule_explains_why_it_failed_for_a_run_that(name):
    ending, causes = diagnose(UNKNOWN[name])
    assert causes == []
    unknown = unexplained(UNKNOWN[name], ending, causes)
    assert "reward" in unknown.looked_at
    assert "kl" in unknown.not_recorded
    assert "actor.optimizer.learning_rate" in {change.option for change in unknown.trials}


def test_a_run_that_failed_for_no_known_cause_is_not_called_healthy(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(SETTINGS + "algorithm: {kl: {coef: 5}}\n")
    write_lines(tmp_path / "metrics.jsonl", *({"step": step, "reward": 0.2 + step % 2 / 10} for step in range(1, 21)))
    assert main(["diagnose", str(tmp_path)]) == 3
    said = capsys.readouterr().out
    assert said.startswith(
        "reward did not rise: 0.25 to 0.25\nfailed, cause unknown: no rule fires\n   looked at: reward\n"
    )
    assert f"`hotseat report {tmp_path}`" in said
    assert "algorithm.kl.coef: 5 -> 0\n" in said
    assert main(["diagnose", str(tmp_path), "--json"]) == 3
    facts = json.loads(capsys.readouterr().out)
    assert (facts["healthy"], facts["causes"], facts["unknown"]["looked_at"]) == (False, [], ["reward"])


def test_a_run_that_learned_until_an_error_is_not_called_healthy(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("task: rl\nactor: {model: m}\ndata: {path: d}\n")
    write_lines(tmp_path / "metrics.jsonl", *({"step": step, "reward": reward} for step, reward in enumerate(RISES)))
    (tmp_path / "heartbeat.json").write_text(json.dumps({"error": "the disk is full\nand more"}))
    assert main(["diagnose", str(tmp_path)]) == 3
    said = capsys.readouterr().out
    assert "it ended with an error: the disk is full\nno rule fires: until that error it learned as" in said
    assert main(["diagnose", str(tmp_path), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["healthy"] is False


def test_few_steps_are_called_neither_failed_nor_healthy(tmp_path, capsys):
    write_lines(tmp_path / "metrics.jsonl", {"step": 1, "reward": 0.2}, {"step": 2, "reward": 0.1})
    assert main(["diagnose", str(tmp_path)]) == 0
    said = "reward fell: 0.2 to 0.1, beginning at step 2\nno rule fires; fewer than 8 steps are too few to judge by\n"
    assert capsys.readouterr().out == said
    assert main(["diagnose", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["healthy"] is None


def test_no_cause_brings_itself_about():
    # Only causes that no other brought about have a cure: around a circle, there would be none.
    graphlib.TopologicalSorter({rule.name: rule.explains for rule in RULES.values()}).prepare()


def test_what_a_cause_brings_about_comes_behind_it():
    ending, causes = diagnose(COLLAPSED["learning-rate"])
    assert str(ending) == "eval/accuracy fell: 0.1 to 0, between steps 0 and 5"
    assert [(cause.rule.name, cause.follows) for cause in causes] == [
        ("learning-rate", None),
        ("truncation", "learning-rate"),
        ("groups-alike", "learning-rate"),
    ]
    assert [str(change) for change in causes[0].cure] == ["actor.optimizer.learning_rate: 0.2 -> 0.02"]
    assert [cause.cure for cause in causes[1:]] == [(), ()]
    # The median of three steps has 8 tokens from step 5 on: two of 5, 6, 7.
    assert "length is 8 at step 5 (a jump by a factor of 4.0 within 3 steps); it went from 2 to 8" in map(
        str, causes[0].signs.evidence
    )


def test_a_run_that_fell_and_came_back_has_fallen():
    reward = [0.1, 0.3, 0.5, 0.6, 0.6, *6 * [0.05], 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.6, 0.6, 0.6]
    ending, _ = diagnose(recorded(reward=reward))
    assert (ending.kind, ending.began, ending.before, ending.after) == ("fell", 6, 0.6, 0.05)


def test_a_run_without_a_signal_before_it_is_right_has_stalled():
    reward = [0.1, 0.2, 0.3, *17 * [0.5]]
    ending, causes = diagnose(recorded(reward=reward, groups_alike=[0.2, 0.3, 0.5, *17 * [0.9]]))
    assert (ending.kind, ending.began) == ("stalled", 4)
    assert [cause.rule.name for cause in causes] == ["groups-alike"]


def test_the_line_names_what_shows_the_fall_first():
    ending, _ = diagnose(recorded(reward=[0.5, 0.5, *18 * [0]], eval__accuracy=[0.7, 0.7, 0, 0, 0]))
    # The reward is 0 from step 3 on, and so the smoothed one; evaluations were made at 0, 5, 10, 15, 20.
    assert str(ending) == "eval/accuracy fell: 0.7 to 0, between steps 5 and 10; reward fell from step 3 on"


def test_the_line_shows_the_metric_that_rose():
    ending, _ = diagnose(recorded(reward=NUM_STEPS * [0.65], eval__accuracy=[0.7, 0.75, 0.8, 0.8, 0.8]))
    assert str(ending) == "eval/accuracy rose: 0.7 to 0.8"


def cause_of(name, run):
    return next(cause for cause in diagnose(run)[1] if cause.rule.name == name)


def said_of(name, run):
    signs = cause_of(name, run).signs
    return [signs.detail, *map(str, signs.evidence)]


@pytest.mark.parametrize(
    ("settings", "loss", "cure"),
    [
        ("actor.optimizer.learning_rate=1e-3 critic.optimizer.learning_rate=2e-3", 20 * [0.1], "0.002 -> 0.006"),
        ("actor.optimizer.learning_rate=1e-3 critic.optimizer.learning_rate=1", 20 * [0.1], "1 -> 0.003"),
        # A tenth of a rate that is not far above the actor's.
        (
            "actor.optimizer.learning_rate=1e-3 critic.optimizer.learning_rate=2e-3",
            [0.1, *19 * [5]],
            "0.002 -> 0.0002",
        ),
    ],
)
def test_a_critic_whose_rate_is_too_high_gets_a_lower_one(settings, loss, cure):
    run = recorded(
        f"algorithm.estimator=gae {settings}", reward=FLAT, explained_variance=NUM_STEPS * [-0.5], value_loss=loss
    )
    assert f"critic.optimizer.learning_rate: {cure}" in map(str, cause_of("critic", run).cure)


@pytest.mark.parametrize("value", [0, 1])
def test_a_constant_reward_is_called_neither_right_nor_wrong(value):
    run = recorded(reward=NUM_STEPS * [value], reward_std=NUM_STEPS * [0], groups_alike=NUM_STEPS * [1])
    run = replace(run, rewards=(value, value))
    for name in ("constant-reward", "groups-alike"):
        assert said_of(name, run)[0] == f"every answer of the run got the same reward, {value}"
    assert [cause.follows for cause in diagnose(run)[1]] == [None, "constant-reward"]


def test_a_temperature_that_makes_answers_alike_from_the_start_keeps_its_cure():
    run = recorded(
        "rollout.temperature=0.02",
        reward=NUM_STEPS * [0],
        reward_std=NUM_STEPS * [0],
        groups_alike=NUM_STEPS * [1],
        truncated=NUM_STEPS * [1],
    )
    assert "rollout.temperature: 0.02 -> 1" in map(str, cause_of("groups-alike", run).cure)


@pytest.mark.parametrize("group", [{"group_reward_std": NUM_STEPS * [0]}, {}])
def test_a_penalty_on_single_answers_is_compared_with_the_spread_over_the_step(group):
    run = recorded(
        "algorithm.kl.coef=10 rollout.samples_per_prompt=1",
        reward=FLAT,
        reward_std=NUM_STEPS * [0.4],
        kl=[0, *19 * [0.05]],
        kl_coefficient=NUM_STEPS * [10],
        length=NUM_STEPS * [2],
        **group,
    )
    # 10 x 0.05 x 2 tokens is 1, and 2.5 times 0.4.
    assert "KL penalty of an answer / reward_std is 2.5 at step 2 (above 1); it went from 0 to 2.5" in said_of(
        "kl-penalty", run
    )
    assert [str(change) for change in cause_of("kl-penalty", run).cure] == ["algorithm.kl.coef: 10 -> 0.4"]


def test_figures_fit_the_step_from_which_a_cause_is_seen():
    collapse = cause_of("entropy-collapse", COLLAPSED["entropy-collapse"])
    assert (collapse.signs.began, [each.step for each in collapse.signs.evidence]) == (3, [3, 4])
    assert "algorithm.entropy_coef: unset -> 0.01" in map(str, collapse.cure)
    assert "truncated is 0.9 at step 1 (half of the answers or more, to the end)" in said_of(
        "truncation", COLLAPSED["truncation"]
    )
    assert "eval/accuracy is 0.2 at step 10 (60% below its peak of 0.5); it went from 0.5 to 0" in said_of(
        "reward-hack", COLLAPSED["reward-hack"]
    )


def test_a_curve_is_judged_by_its_trend():
    curve = MetricCurve((1, 2, 3, 4, 5, 6), (0.0, 1.0, 0.0, 0.0, 1.0, 1.0))
    assert curve.values == (0.0, 0.0, 0.0, 0.0, 1.0, 1.0)
    assert curve.lasts_from(lambda value: value == 1.0) == 5
    assert curve.lasts_from(lambda value: value == 0.0) is None
    assert curve.noise == pytest.approx(1.0 / 0.954)  # the median of 1, 1, 0, 1, 0
    assert (curve.first, curve.last, curve.at(0), curve.at(9)) == (0.0, 1.0, 0.0, 1.0)


def write_lines(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_records_are_read_from_files(tmp_path):
    (tmp_path / "config.yaml").write_text(SETTINGS)
    write_lines(
        tmp_path / "metrics.jsonl",
        {"step": 1, "reward": 0.5, "grad_norm": 1.5},
        {"step": 2, "reward": 0.25, "grad_norm": "nan"},
    )
    write_lines(tmp_path / "distributions.jsonl", {"step": 1, "reward": [[-1.0, 2], [0.5, 1]]})
    segments = [{"engine_log_probs": [None, -0.5, -1.5]}]
    write_lines(tmp_path / "samples.jsonl", {"step": 1, "segments": segments}, {"step": 1, "segments": []})
    entry = {"epoch": 0, "prompt": 3, "version": 0, "step": 2}
    write_lines(
        tmp_path / "ledger.jsonl",
        entry | {"samples": [0, 1, 2], "state": "trained", "reason": ""},
        entry | {"samples": [3], "state": "failed", "reason": "it broke"},
    )
    write_lines(tmp_path / "heartbeat.json", {"error": "RewardError: too many"})
    found = read_recorded(tmp_path)
    assert found.curve("reward").raw == (0.5, 0.25)
    assert found.curve("surprise") == MetricCurve((1,), (1.0,))
    assert (found.rewards, found.passes, found.num_prompts) == ((-1.0, 0.5), {0: 2}, 1)
    assert (found.failed_shares, found.reasons) == ({2: 0.25}, {"failed": "it broke"})
    assert (found.not_finite, found.error) == ({"grad_norm": 2}, "RewardError: too many")
    assert [cause.rule.name for cause in diagnose(found)[1]] == ["failed-rewards", "not-finite"]


def test_a_directory_with_metrics_alone_is_diagnosed(tmp_path, capsys):
    write_lines(tmp_path / "metrics.jsonl", *({"step": step, "reward": value} for step, value in enumerate(RISES, 1)))
    assert read_recorded(tmp_path).config == Config()
    assert main(["diagnose", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "reward rose: 0.16 to 0.8\nhealthy: no rule fires\n"


def test_a_directory_without_a_run_is_refused(tmp_path, capsys):
    assert main(["diagnose", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_the_page_lists_every_rule():
    page = PAGE.read_text()
    assert page == with_table(page, render_table(), "<!-- rules -->", "<!-- end of rules -->"), render_table()


@pytest.mark.slow
def test_a_run_whose_reward_never_differs_is_diagnosed(task, capsys):
    from hotseat.loop.run import start

    (task / "reward.py").write_text("def reward_func(queries, prompts, labels):\n    return [0.0 for _ in queries]\n")
    start(loads(rl_yaml(task), ["train.num_episodes=3"]))
    capsys.readouterr()
    assert main(["diagnose", str(task / "runs" / "run"), "--json"]) == 3
    said = json.loads(capsys.readouterr().out)
    assert said["causes"][0]["name"] == "constant-reward"
    assert not said["healthy"]
    assert main(["diagnose", str(task / "runs" / "run")]) == 3
    assert "1. constant-reward: every answer has the same reward, so nothing is learned (seen from step 1)" in (
        capsys.readouterr().out
    )


def test_a_run_without_rollouts_is_refused(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("task: sft\nactor: {model: m}\ndata: {path: d}\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert main(["diagnose", str(tmp_path)]) == 2
    assert "is a run of sft, and the rules are about rollouts and rewards" in capsys.readouterr().err
