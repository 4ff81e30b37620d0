"""kill -9 and SIGSTOP of models on Ray: their groups are restarted in the living run, and no bit changes."""

import re

import pytest
from fault_cases import TWO_RANKS, Faulty, differences, make_faulty_task
from loop_cases import make_value_model, ppo_yaml

from hotseat.config import loads
from hotseat.faults import Fault
from hotseat.loop.run import start
from hotseat.observe import read_lines

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(1200)]

AGAIN = r"; (.*) started again, the run continues after step (\d) \(restart \d of 3 without a new checkpoint\)"
IN_FRONT = "checkpoint.background=false"


def restarts(run: Faulty) -> list[tuple[str, int]]:
    """Return what was restarted, and after which step the run continued."""
    lines = read_lines(run.run_dir / "events.jsonl")
    found = [re.search(AGAIN, line["text"]) for line in lines if line["kind"] == "restart"]
    return [(each[1], int(each[2])) for each in found]


def test_ranks_that_are_killed_or_stopped_at_any_moment_are_restarted_together(tmp_path):
    """Scenarios 8 and 9: in an update, in a push, while a checkpoint is written, and stopped in an update.

    Deaths are noticed within 5 s, and a rank that is stopped after `silence_timeout_s`.
    """
    task = make_faulty_task(tmp_path)
    with Faulty(task, num_passes=3, placement=TWO_RANKS) as calm:  # sums of two ranks differ from those of one
        code, _, errors = calm.go()
        assert code == 0, errors[-3000:]
        calm.faults.rename(task / "no-faults")
        undisturbed = calm.run_dir.rename(task / "runs" / "undisturbed")
    limit = {"silence_timeout_s": 4}
    with Faulty(task, num_passes=3, placement=TWO_RANKS, cluster=limit, overrides=[IN_FRONT]) as run:
        # In steps 2, 3, 4 and 6: new processes count anew.
        run.arm(
            Fault("update.middle", "kill", by="actor:1", skip=1),
            Fault("save.during", "kill", by="actor:1", skip=1),
            Fault("push.during", "kill", to="actor:0", skip=5),
            Fault("update.middle", "stop", by="actor:1", skip=2),
        )
        code, out, errors = run.go()
        assert code == 0, errors[-3000:]
        assert run.all_happened(), out
        assert differences(undisturbed, run.run_dir) == []
        assert restarts(run) == [("actor (2 ranks)", step) for step in (1, 2, 3, 5)], out
        assert "was ended during 'update': it was stopped for 4 s" in out
        assert run.is_gone(within_s=60)
        events = [line["time"] for line in read_lines(run.run_dir / "events.jsonl") if line["kind"] == "restart"]
        noticed_s = [event - moment for event, moment in zip(events, run.moments(), strict=True)]
        assert min(noticed_s[:3]) < 5  # of three, since other work on the machine may hold one up
        assert 4 <= noticed_s[3] < 4 + 15  # the stopped one: `silence_timeout_s`, and what its end takes
    lines = read_lines(run.run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(7))
    assert (lines[-1]["group_restarts"], lines[-1]["engine_restarts"]) == (4, 0)


PLACEMENT = "{actor: 0, 'reference,rollout': '@actor', critic: 1, reward: 2}"


def test_a_critic_a_reference_and_a_reward_model_are_restarted_and_the_actor_stays(tmp_path):
    """Scenario 8: with PPO, whose critic goes back to its checkpoint with the actor, which has lived on."""
    task = make_faulty_task(tmp_path)
    make_value_model(task / "reward_model")

    def config_text(name: str, cluster: str) -> str:
        return ppo_yaml(
            task,
            name=name,
            cluster=cluster,
            reward=f"{{model: {task}/reward_model}}",
            checkpoint="{every: 1}",
            train="{dtype: fp32, batch_size: 16, micro_batch_size: 4, num_episodes: 3}",
        )

    start(loads(config_text("undisturbed", "{runtime: local}")))
    with Faulty(task, num_passes=3) as run:
        (task / "disturbed.yaml").write_text(config_text("disturbed", f"{{component_placement: {PLACEMENT}}}"))
        run.arm(
            Fault("update.middle", "kill", by="critic:0", skip=2),
            Fault("save.during", "kill", by="critic:0", skip=3),
            Fault("prepare.before", "kill", to="reward:0", skip=5),
            Fault("prepare.before", "kill", to="reference:0", skip=7),
        )
        code, out, errors = run.go(timeout_s=860)
        assert code == 0, errors[-3000:]
        assert run.all_happened(), out
        assert {what for what, _ in restarts(run)} == {"critic", "reward", "reference"}, out
        assert differences(task / "runs" / "undisturbed", run.run_dir) == []
