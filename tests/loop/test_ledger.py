"""What became of every sample."""

import io

import pytest
from loop_cases import make_task, rl_yaml
from rich.console import Console

from hotseat.cli.ledger_view import show_ledger
from hotseat.config import loads
from hotseat.errors import UserError
from hotseat.loop.ledger import Entry, count_states, read_ledger
from hotseat.loop.run import start

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
    assert sum(count_states(entries).values()) == len(keys)


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
    assert "no samples: those of a step are recorded when it ends" in capsys.readouterr().out


def test_an_entry_names_its_samples():
    assert [str(key) for key in Entry(2, 5, (0, 3), "trained", 1, 0).keys] == ["2/5/0", "2/5/3"]
