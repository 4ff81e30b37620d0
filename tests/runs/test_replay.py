"""A recorded run is trained again from its kept groups: without engines, and to the last bit."""

import shutil
from pathlib import Path

import pytest
from loop_cases import make_value_model, ppo_yaml, rl_yaml, same, weights
from stopped_runs import stopped_after_saving
from test_overlap import BESIDE, FILTERED, SLEEPS, long_answers

from hotseat.cli.main import main
from hotseat.config import loads
from hotseat.loop.rl.arrivals import recorded_batches
from hotseat.loop.rl.pacer import Pace, Pacer
from hotseat.loop.rl.stream import Recording
from hotseat.loop.run import start
from hotseat.observe import read_lines

pytestmark = pytest.mark.slow

KEPT = "log.keep_rollouts=true"


def record(task: Path, overlap: str, *overrides: str, **sections: str) -> None:
    sections = ({"cluster": BESIDE} if overlap else {}) | sections
    start(loads(rl_yaml(task, overlap=overlap, **sections), [KEPT, "train.num_episodes=3", *overrides]))


def replay(task: Path, *overrides: str) -> int:
    return main(["replay", str(task / "runs" / "run"), *overrides])


def batches_of_pacer(path: Path, pace: Pace) -> list[list[tuple[int, int]]]:
    """Drive the pacer with recorded arrivals; return the batches that it chooses."""
    pacer, tickets, batches = Pacer(pace), {}, []
    for line in read_lines(path):
        if line["event"] == "begun":
            keys = [tuple(key) for key in line["groups"]]
            new = pacer.admit()
            tickets |= dict(zip([key for key in keys if key not in tickets], new, strict=True))
            pacer.begin_again([tickets[key] for key in keys])
        elif line["event"] == "arrived":
            arrive = pacer.arrive if line["dropped"] is None else pacer.drop
            arrive(tickets[tuple(line["group"])])
        elif line["event"] == "taken":
            pacer.take(pacer.batch())
            names = {ticket: key for key, ticket in tickets.items()}
            batches.append([names[ticket] for ticket in pacer.training])
        elif line["event"] == "trained":
            pacer.trained()
    return batches


@pytest.mark.long
@pytest.mark.parametrize("in_flight", [pytest.param("keep", marks=pytest.mark.long), "recompute"])
def test_by_arrival_two_replays_equal_the_recording(task, capsys, in_flight):
    """Answers that are open at a push go on with other weights, and groups come in whatever order they like."""
    (task / "reward.py").write_text(SLEEPS)
    overlap = f"{{staleness: 2, order: arrival, in_flight: {in_flight}}}"
    record(task, overlap, **long_answers(task))
    run = task / "runs" / "run"
    (task / "reward.py").write_text("def reward_func(queries, prompts, labels):\n    raise ValueError('not again')\n")
    for number in (1, 2):
        assert replay(task) == 0
        assert same(weights(task), weights(task, f"run-replay-{number}"))
        ledgers = [(task / "runs" / name / "ledger.jsonl").read_bytes() for name in ("run", f"run-replay-{number}")]
        assert ledgers[0] == ledgers[1]
    assert f"the same weights as {run}/model, bit for bit" in capsys.readouterr().out
    pace = Pace(groups_per_step=4, staleness=2, queue=2, order="arrival", num_groups=24)
    recorded = [[tuple(key) for key in batch["groups"]] for batch in recorded_batches(run).values()]
    assert batches_of_pacer(run / "arrivals.jsonl", pace) == recorded
    assert len({version for entry in read_lines(run / "ledger.jsonl") for version in [entry["version"]]}) > 1


def test_a_synchronous_run_with_every_role_is_replayed(task, capsys):
    make_value_model(task / "judge")
    start(loads(ppo_yaml(task, reward=f"{{model: {task}/judge}}"), [KEPT, "checkpoint.every=3"]))
    run = task / "runs" / "run"
    assert replay(task) == 0
    assert same(weights(task), weights(task, "run-replay-1"))
    assert replay(task, "actor.optimizer.learning_rate=1e-3") == 1
    assert f"other weights than {run}/model" in capsys.readouterr().out
    # Only steps whose groups are all there are replayed.
    assert Recording(run).last_step == 4
    drop(run, step=3)
    assert Recording(run).last_step == 2
    assert replay(task) == 1
    assert "the 2 recorded steps of" in capsys.readouterr().out
    drop(run, step=1)
    assert replay(task) == 2
    assert "the groups of its first step are not in" in capsys.readouterr().err
    shutil.rmtree(run / "rollouts")
    assert replay(task) == 2
    assert "only runs with log.keep_rollouts keep what they learned from" in capsys.readouterr().err
    assert main(["replay", str(task / "nothing")]) == 2
    assert "holds no run" in capsys.readouterr().err


def drop(run: Path, step: int) -> None:
    """Remove a group of a step from those that were kept."""
    epoch, prompt = recorded_batches(run)[step]["groups"][0]
    (run / "rollouts" / f"{epoch}-{prompt}.group").unlink()


@pytest.mark.long
def test_a_run_that_was_resumed_is_replayed_as_a_whole(task):
    """Steps after the checkpoint were made twice, from other groups; the last ones count."""
    (task / "reward.py").write_text(SLEEPS)
    overlap = "{staleness: 1, order: arrival, in_flight: keep}"
    with stopped_after_saving(3):
        record(task, overlap, "checkpoint.every=1", *FILTERED)
    record(task, overlap, "checkpoint.every=1", "checkpoint.resume=true", *FILTERED)
    assert replay(task) == 0
    assert same(weights(task), weights(task, "run-replay-1"))
    ledgers = [(task / "runs" / name / "ledger.jsonl").read_bytes() for name in ("run", "run-replay-1")]
    assert ledgers[0] == ledgers[1]
    assert b"dropped" in ledgers[0]
