"""What `hotseat plan --from` predicts, from recorded costs worked by hand."""

import json
import re

import pytest
import yaml

from hotseat.cli.main import main
from hotseat.config import loads, to_saved
from hotseat.errors import UserError
from hotseat.loop.rl.forecast import (
    Costs,
    GroupCost,
    Resources,
    for_samples,
    forecasts,
    own_step_s,
    recorded_costs,
    resources_of,
    without_queueing,
)

BESIDE = Resources(num_places=4, is_shared=False)
SFT = "task: sft\nactor: {model: some/model}\ndata: {path: rows.jsonl, input_key: a, output_key: b}\n"


def config_of(text="", batch_size=2, samples=1):
    return loads(
        f"""
actor: {{model: some/model}}
data: {{path: prompts.jsonl}}
reward: {{function: reward.py}}
cluster: {{inventory: 1x2, component_placement: {{actor: 0, rollout: 1}}}}
rollout: {{batch_size: {batch_size}, samples_per_prompt: {samples}, num_slots: 4}}
algorithm: {{estimator: reinforce}}
{text}
"""
    )


def costs_of(*seconds, step_s=0.0, training_s=10.0):
    return Costs(tuple(GroupCost((each,)) for each in seconds), step_s, training_s, num_steps=2)


def test_one_step_off_hides_the_shorter_of_rollout_and_training():
    rows = forecasts(config_of(), costs_of(4, 6), BESIDE, (0, 1))
    assert [(row.step_s, row.step_s_waiting) for row in rows] == [(16, 16), (10, 10)]


def test_on_shared_devices_equal_groups_gain_nothing():
    rows = forecasts(config_of(), costs_of(6, 6), Resources(2, is_shared=True), (0, 1))
    assert rows[0].step_s == rows[1].step_s == 16
    assert rows[0].step_s_waiting is None


def test_the_recorded_run_itself_is_predicted_with_its_own_overlap():
    assert own_step_s(config_of(), costs_of(4, 6), BESIDE) == 16
    ahead = "overlap: {staleness: 1, order: arrival, in_flight: keep}"
    assert own_step_s(config_of(ahead), costs_of(4, 6), BESIDE) == 10
    assert own_step_s(config_of("overlap: {staleness: 1, in_flight: restart}"), costs_of(4, 6), BESIDE) is None


def test_waiting_for_a_slot_is_taken_out_of_recorded_episodes():
    # Four episodes of 3 s each on one slot were seen to take 3, 6, 9 and 12 s.
    config = config_of(batch_size=4)
    recorded = costs_of(3, 6, 9, 12, step_s=22.0)
    unqueued = without_queueing(config, recorded, Resources(1, is_shared=False))
    assert sum(cost.episode_s[0] for cost in unqueued.groups) == pytest.approx(12.0, rel=2e-3)
    assert without_queueing(config, recorded, BESIDE) == recorded


def test_other_groups_are_made_of_the_recorded_episodes():
    costs = for_samples(costs_of(1, 2, 3, 4), 2, training_factor=2.0)
    assert [cost.episode_s for cost in costs.groups] == [(1, 2), (3, 4)]
    assert costs.training_s == 20.0
    assert [cost.episode_s for cost in for_samples(costs_of(1, 2), 3, 1.0).groups] == [(1, 2, 1)]


def test_an_agent_needs_no_slot_while_its_tool_works():
    assert resources_of(config_of(), 2, is_shared=False).num_places == 8
    agent = config_of("agent: {path: agent.py, max_concurrent: 32}")
    assert resources_of(agent, 2, is_shared=False).num_places == 64


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "config.yaml").write_text(to_saved(config_of()))
    rows = [
        {"step": 0, "eval/accuracy": 0.5},
        {"step": 1, "step_s": 99.0, "time/rollout": 1.0},
        {"step": 2, "step_s": 16.0, "time/rollout": 6.0},
        {"step": 3, "step_s": 18.0, "time/wait": 6.0, "time/drain": 2.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [
        {"event": "restored", "step": 0, "stream": None},
        {"event": "taken", "step": 1, "groups": [[0, 0]], "seconds": [[99.0, 0.0]]},
        {"event": "taken", "step": 2, "groups": [[0, 1], [0, 2]], "seconds": [[4.0, 0.5], [6.0, 0.0]]},
        {"event": "taken", "step": 3, "groups": [[0, 3]], "dropped": [[0, 4]], "seconds": [[6.0, 0.0], [5.0, 0.0]]},
    ]
    (tmp_path / "arrivals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_costs_are_read_from_a_run_without_its_first_step(run_dir):
    costs = recorded_costs(run_dir)
    assert costs.groups == (GroupCost((4,), 0.5), GroupCost((6,)), GroupCost((6,)), GroupCost((5,), is_dropped=True))
    assert (costs.step_s, costs.training_s, costs.num_steps) == (17.0, 10.0, 2)


def test_plan_prints_the_gain_of_staleness(run_dir, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["plan", str(run_dir / "config.yaml"), "--from", str(run_dir)]) == 0
    printed = capsys.readouterr().out
    assert "Staleness, as predicted from the last 2 steps" in printed
    assert "that run, staleness 0: 17.00 s a step measured" in printed


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("arrivals.jsonl", "has no arrivals.jsonl: name the directory of an RL run that has made some steps"),
        ("config.yaml", "there is no .*config.yaml; name the directory of a run"),
    ],
)
def test_a_directory_without_a_run_is_refused(run_dir, capsys, broken, message, tmp_path_factory):
    config = tmp_path_factory.mktemp("config") / "rl.yaml"
    config.write_text((run_dir / "config.yaml").read_text())
    (run_dir / broken).unlink()
    assert main(["plan", str(config), "--from", str(run_dir)]) == 2
    assert re.search(message, " ".join(capsys.readouterr().err.split()))


def test_a_run_without_timed_episodes_is_refused(run_dir):
    (run_dir / "arrivals.jsonl").write_text('{"event": "taken", "step": 2, "groups": [[0, 1]]}\n')
    with pytest.raises(UserError, match="no step after its first whose episodes were timed"):
        recorded_costs(run_dir)


def test_other_tasks_have_no_staleness(run_dir, capsys, tmp_path_factory):
    folder = tmp_path_factory.mktemp("config")
    (folder / "sft.yaml").write_text(SFT)
    assert main(["plan", str(folder / "sft.yaml"), "--from", str(run_dir)]) == 2
    assert "the task of this config is sft" in capsys.readouterr().err
    (folder / "rl.yaml").write_text((run_dir / "config.yaml").read_text())
    (run_dir / "config.yaml").write_text(SFT)
    assert main(["plan", str(folder / "rl.yaml"), "--from", str(run_dir)]) == 2
    assert "that run's task is sft" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("actor: {model: other/model}", "there the actor is some/model, here the actor is other/model"),
        ("actor: {model: org/Llama-3-8B}", "there the actor is some/model, here the actor has 8.03B parameters"),
        (
            "algorithm: {estimator: reinforce, kl: {coef: 0.1}}",
            "there is no reference, here the reference is some/model",
        ),
    ],
)
def test_the_costs_of_a_run_with_other_models_are_refused(run_dir, capsys, tmp_path_factory, text, message):
    """Before the plan is printed: seconds of one model say nothing about those of another."""
    path = tmp_path_factory.mktemp("config") / "rl.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(to_saved(config_of())), **yaml.safe_load(text)}))
    assert main(["plan", str(path), "--from", str(run_dir)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in " ".join(err.split())
    assert "Name the directory of a run with the same models" in " ".join(err.split())
