"""A model whose process dies is started again in the living run, which goes back to its checkpoint: no bit changes."""

import json
from pathlib import Path

import pytest
from fault_cases import differences
from loop_cases import make_task, ppo_yaml, rl_yaml

from hotseat import faults
from hotseat.cli.main import main
from hotseat.config import loads
from hotseat.errors import RunError
from hotseat.faults import Fault
from hotseat.loop.rl.ledger import read_ledger
from hotseat.loop.run import start
from hotseat.observe import read_lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CHECKPOINT = "{every: 1, background: false}"
FOUR_STEPS = "{dtype: fp32, batch_size: 16, micro_batch_size: 8, num_episodes: 2}"
ASYNC = {
    "cluster": "{runtime: local, inventory: 1x2, component_placement: {actor: 0, rollout: 1}}",
    "overlap": "{staleness: 2}",
}


@pytest.fixture
def task(tmp_path):
    return make_task(tmp_path)


def go(task: Path, monkeypatch, name: str, text: str, *armed: Fault) -> Path:
    """Run in this process, with faults."""
    folder = task / f"faults-{name}"
    folder.mkdir()
    monkeypatch.setattr(faults, "_directory", folder)
    monkeypatch.setattr(faults, "_seen", {})
    for number, fault in enumerate(armed):
        fault.arm(folder, str(number))
    start(loads(text))
    assert not list(folder.glob("*.fault"))
    return task / "runs" / name


def events(run: Path, kind: str = "restart") -> list[str]:
    return [line["text"] for line in read_lines(run / "events.jsonl") if line["kind"] == kind]


def test_an_actor_that_dies_in_an_update_and_in_a_save_is_restarted_and_no_bit_changes(task, monkeypatch, capsys):
    """Scenario 8, in one process: twice in a run, and every line of its records is there once."""

    def text(name: str) -> str:
        return rl_yaml(task, name=name, checkpoint=CHECKPOINT, train=FOUR_STEPS, eval=f"{{path: {task}/prompts.jsonl}}")

    calm = go(task, monkeypatch, "calm", text("calm"))
    died = [Fault("update.middle", "die", skip=2), Fault("save.during", "die", skip=2)]
    run = go(task, monkeypatch, "run", text("run"), *died)
    assert differences(calm, run) == []
    first, second = events(run)
    again = "; actor started again, the run continues after step"
    assert first == (
        f"actor rank 0: 'update' raised RunError: a fault at update.middle{again} 2"
        " (restart 1 of 3 without a new checkpoint)"
    )
    assert f"{again} 2 (restart 2 of 3 without a new checkpoint)" in second
    lines = read_lines(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert [line["group_restarts"] for line in lines[1:]] == [0, 0, 2, 2]
    for name in ("reward", "loss", "grad_norm", "version", "eval/reward"):
        assert [line.get(name) for line in lines] == [line.get(name) for line in read_lines(calm / "metrics.jsonl")]
    assert main(["status", str(run)]) == 0
    assert "2 restarts" in capsys.readouterr().out
    taken = [json.loads(line) for line in (run / "arrivals.jsonl").read_text().splitlines()]
    assert [line["step"] for line in taken if line["event"] == "restored"] == [2, 2]


@pytest.mark.long
@pytest.mark.parametrize("of_critic", [True, False])
def test_a_critic_or_an_actor_dies_and_the_other_stays(task, monkeypatch, of_critic):
    """With PPO, in the third step. What lives goes back, too: it has learned in that step, or would learn twice."""

    def text(name: str) -> str:
        return ppo_yaml(task, name=name, checkpoint="{every: 1, background: true}")

    calm = go(task, monkeypatch, "calm", text("calm"))
    # Four optimizer steps of the critic, and then four of the actor, in each step.
    run = go(task, monkeypatch, "run", text("run"), Fault("update.middle", "die", skip=2 * 8 + (1 if of_critic else 5)))
    assert differences(calm, run) == []
    [restart] = events(run)
    assert ("; critic started again" if of_critic else "; actor started again") in restart


def test_samples_that_were_made_ahead_are_neither_lost_nor_learned_twice(task, monkeypatch):
    """At staleness 2: what is in flight at the death begins again, with the versions of the checkpoint."""
    text = rl_yaml(task, checkpoint="{every: 2, background: false}", train=FOUR_STEPS.replace("2}", "4}"), **ASYNC)
    run = go(
        task, monkeypatch, "run", text, Fault("update.middle", "die", skip=3), Fault("update.middle", "die", skip=6)
    )
    trained = [key for entry in read_ledger(run) if entry.state == "trained" for key in entry.keys]
    assert len(trained) == len(set(trained)) == 8 * 4 * 4
    lines = read_lines(run / "metrics.jsonl")[1:]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["version"] for line in lines] == list(range(1, 9))
    assert max(line["staleness_max"] for line in lines) <= 2
    assert len(events(run)) == 2


def test_deaths_that_go_on_without_a_new_checkpoint_end_the_run(task, monkeypatch):
    text = rl_yaml(task, checkpoint=CHECKPOINT, train=FOUR_STEPS, run="{max_restarts: 1}")
    again = [Fault("update.middle", "die", skip=1)] * 2
    with pytest.raises(RunError, match="a fault at update.middle"):
        go(task, monkeypatch, "run", text, *again)
    assert len(events(task / "runs" / "run")) == 1


@pytest.mark.parametrize(("checkpoint", "do"), [("{every_minutes: 0}", "die"), (CHECKPOINT, "raise")])
def test_without_a_checkpoint_and_after_an_error_that_comes_again_the_run_ends(task, monkeypatch, checkpoint, do):
    text = rl_yaml(task, checkpoint=checkpoint, train=FOUR_STEPS)
    with pytest.raises(RunError, match="a fault at update.middle"):
        go(task, monkeypatch, "run", text, Fault("update.middle", do, skip=1))
    assert events(task / "runs" / "run") == []
