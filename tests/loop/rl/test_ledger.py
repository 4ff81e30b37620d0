"""What became of every sample."""

import io
import json
import shutil

import pytest
from loop_cases import make_task, rl_yaml
from rich.console import Console

from hotseat.cli.ledger_view import show_ledger
from hotseat.config import loads
from hotseat.errors import RewardError, UserError
from hotseat.loop.rl.collect import Collected
from hotseat.loop.rl.ledger import CauseCount, Ledger, LedgerEntry, count_causes, read_ledger
from hotseat.loop.run import start
from hotseat.loop.workers.group_facts import GroupFacts
from hotseat.observe import read_lines

pytestmark = pytest.mark.slow

# Fails for the prompt 3+4=, gives all answers to 1+2= the same, and counts sevens otherwise.
REWARD = """
def reward_func(queries, prompts, labels):
    if prompts[0] == "3+4=":
        return [float("nan"), *[1.0] * (len(queries) - 1)]
    if prompts[0] == "1+2=":
        return [1.0] * len(queries)
    return [0.2 + 0.1 * index for index in range(len(queries))]
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    task = make_task(tmp_path_factory.mktemp("ledger"))
    (task / "reward.py").write_text(REWARD)
    overrides = [
        "algorithm.filtering.enabled=true",
        "algorithm.filtering.low=0.0",
        "algorithm.filtering.high=0.9",
        "reward.max_failed_fraction=0.5",
        "reward.retries=0",
        "rollout.batch_size=7",
        "train.batch_size=7",
        "train.micro_batch_size=7",
        "data.max_samples=8",
    ]
    start(loads(rl_yaml(task), overrides))
    return task / "runs" / "run"


def test_every_sample_has_one_fate(run_dir):
    entries = list(read_ledger(run_dir))
    keys = [key for entry in entries for key in entry.keys]
    assert len(keys) == len(set(keys))
    dropped = [entry for entry in entries if entry.state == "dropped"]
    assert {entry.reason for entry in dropped} == {"score too high"}
    failed = [entry for entry in entries if entry.state == "failed"]
    assert all("reward" in entry.reason and entry.samples == (0,) for entry in failed)
    assert failed
    trained = [entry for entry in entries if entry.state == "trained"]
    assert all(entry.version == entry.step - 1 for entry in trained)
    assert sum(each.num_samples for each in count_causes(entries)) == len(keys)


def test_the_command_counts_and_tells_a_history(run_dir):
    out = io.StringIO()
    show_ledger(run_dir, None, Console(file=out, width=200))
    assert "trained" in out.getvalue()
    assert "score too high" in out.getvalue()
    entry = next(entry for entry in read_ledger(run_dir) if entry.state == "dropped")
    out = io.StringIO()
    show_ledger(run_dir, str(entry.keys[0]), Console(file=out, width=200))
    expected = f"{entry.keys[0]}  dropped at step {entry.step}, sampled by version {entry.version}: score too high"
    assert out.getvalue().strip() == expected
    for sample, message in (("7", "give pass, prompt and sample"), ("99/0/0", "has no sample 99/0/0")):
        with pytest.raises(UserError, match=message):
            show_ledger(run_dir, sample)
    with pytest.raises(UserError, match="has no ledger"):
        show_ledger(run_dir.parent, None)


def test_a_ledger_without_samples_says_why(tmp_path, capsys):
    (tmp_path / "ledger.jsonl").touch()
    show_ledger(tmp_path, None)
    assert "no samples: they are recorded at the end of their step" in capsys.readouterr().out


def test_the_command_shows_a_row_per_cause_with_an_example(tmp_path):
    entries = [
        LedgerEntry(0, 1, (0, 1), "trained", 1, 0),
        LedgerEntry(0, 2, (0,), "failed", 1, 0, "0/2/0: the reward is [1.5] at line 7"),
        LedgerEntry(0, 3, (2,), "failed", 1, 0, "0/3/2: the reward is [-2e-05] at line 7"),
        LedgerEntry(1, 3, (2,), "failed", 2, 1, "1/3/2: the reward is [3] at line 7"),
        LedgerEntry(0, 4, (0, 1, 2, 3, 4), "dropped", 1, 0, "score too high"),
        LedgerEntry(0, 5, (0,), "dropped", 1, 0, "score too low"),
    ]
    written = "".join(json.dumps(vars(entry)) + "\n" for entry in entries)
    (tmp_path / "ledger.jsonl").write_text(written)
    assert count_causes(read_ledger(tmp_path)) == [
        CauseCount("dropped", 5, "score too high", 1),
        CauseCount("failed", 3, "0/2/0: the reward is [1.5] at line 7", 3),
        CauseCount("trained", 2, "", 1),
        CauseCount("dropped", 1, "score too low", 1),
    ]
    out = io.StringIO()
    show_ledger(tmp_path, None, Console(file=out, width=200))
    rows = [line for line in out.getvalue().splitlines() if "│" in line]
    assert [[cell.strip() for cell in row.strip("│").split("│")] for row in rows] == [
        ["dropped", "5", "score too high"],
        ["failed", "3", "such as 0/2/0: the reward is [1.5] at line 7"],
        ["trained", "2", ""],
        ["dropped", "1", "score too low"],
    ]
    assert (tmp_path / "ledger.jsonl").read_text() == written  # the file keeps every reason


def test_an_entry_names_its_samples():
    assert [str(key) for key in LedgerEntry(2, 5, (0, 3), "trained", 1, 0).keys] == ["2/5/0", "2/5/3"]


# Raises for every prompt but the first four that it scores, as long as a file of that name is there.
BREAKS_DOWN = """
import os
seen = set()
def reward_func(queries, prompts, labels):
    seen.add(prompts[0])
    if os.path.exists({broken!r}) and len(seen) > 4:
        raise KeyError("server")
    return [float(query[len(prompt):].count("7")) for query, prompt in zip(queries, prompts)]
"""


def test_the_step_that_stops_a_run_is_recorded_and_taken_back_when_it_is_resumed(tmp_path):
    task = make_task(tmp_path)
    broken = task / "broken"
    broken.touch()
    (task / "reward.py").write_text(BREAKS_DOWN.format(broken=str(broken)))
    options = ["checkpoint.every=1", "checkpoint.background=false", "reward.retries=0"]
    with pytest.raises(RewardError, match="16 of 16 samples have no reward"):
        start(loads(rl_yaml(task), options))
    run_dir = task / "runs" / "run"
    entries = list(read_ledger(run_dir))
    assert {(entry.state, entry.step, entry.version) for entry in entries} == {("trained", 1, 0), ("failed", 2, 1)}
    failed = [entry for entry in entries if entry.state == "failed"]
    assert len({key for entry in failed for key in entry.keys}) == 16
    assert all("raised KeyError: 'server' at line 7" in entry.reason for entry in failed)
    samples = [line for line in read_lines(run_dir / "samples.jsonl") if line["step"] == 2]
    assert samples
    assert {line["state"] for line in samples} == {"failed"}
    assert "KeyError" in (run_dir / "report.html").read_text()

    broken.unlink()
    start(loads(rl_yaml(task), [*options, "checkpoint.resume=true"]))
    entries = list(read_ledger(run_dir))
    assert {(entry.state, entry.step, entry.version) for entry in entries} == {("trained", 1, 0), ("trained", 2, 1)}
    keys = [key for entry in entries for key in entry.keys]
    assert len(keys) == len(set(keys)) == 32


def test_groups_that_could_have_been_trained_are_dropped_with_the_run(tmp_path):
    ledger = Ledger(tmp_path)
    kept = GroupFacts(0, 5, "", (0, 1), (1.0, 0.0), (1.0, 0.0), (2, 2), (4, 4), (False, False), ((2, "no server"),))
    ledger.record(3, 2, Collected((kept,), 1, (), 1), is_trained=False)
    assert list(read_ledger(tmp_path)) == [
        LedgerEntry(0, 5, (0, 1), "dropped", 3, 2, "the run stopped in this step"),
        LedgerEntry(0, 5, (2,), "failed", 3, 2, "no server"),
    ]


THREES = ["rollout.batch_size=3", "train.batch_size=12", "train.micro_batch_size=12", "checkpoint.every=1"]
AHEAD = ["overlap.staleness=1", "cluster.inventory=1x2", "cluster.component_placement={actor: 0, rollout: 1}"]


@pytest.mark.parametrize("how", [[], pytest.param(AHEAD, marks=pytest.mark.long)], ids=["synchronous", "ahead"])
def test_prompts_too_few_for_a_step_are_said_and_counted_until_a_longer_run_takes_them(tmp_path, how):
    task = make_task(tmp_path)
    start(loads(rl_yaml(task), [*THREES, *how]))
    run_dir = task / "runs" / "run"
    says = "not used: the last 2 prompts of the 8 of 1 pass, too few for a step of 3;"
    assert any(event["text"].startswith(says) for event in read_lines(run_dir / "events.jsonl"))
    fates = {(entry.epoch, entry.prompt): entry for entry in read_ledger(run_dir)}
    assert sorted(fates) == [(0, prompt) for prompt in range(8)]
    left = [entry for entry in fates.values() if entry.state == "dropped"]
    reason = "left over at the end: a step takes more prompts than were left"
    assert [(entry.samples, entry.step, entry.reason) for entry in left] == [((0, 1, 2, 3), 2, reason)] * 2
    out = io.StringIO()
    show_ledger(run_dir, None, Console(file=out, width=200))
    assert ["dropped", "8", reason] in [
        [cell.strip() for cell in line.strip("│").split("│")] for line in out.getvalue().splitlines()
    ]
    out = io.StringIO()
    show_ledger(run_dir, str(left[0].keys[0]), Console(file=out, width=200))
    assert out.getvalue().strip() == f"{left[0].keys[0]}  dropped at step 2, never sampled: {reason}"

    shutil.rmtree(run_dir / "model")  # as if the run had been stopped before its export
    start(loads(rl_yaml(task), [*THREES, *how, "train.num_episodes=2", "checkpoint.resume=true"]))
    entries = list(read_ledger(run_dir))
    keys = [(entry.epoch, entry.prompt) for entry in entries]
    assert sorted(keys) == [(epoch, prompt) for epoch in range(2) for prompt in range(8)]
    assert [entry.epoch for entry in entries if entry.state == "dropped"] == [1]  # 16 prompts in five steps of three
