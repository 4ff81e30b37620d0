"""Where nothing is restarted, a critic or a reward model that dies ends the run, which resumes to the same bits."""

import pytest
from fault_cases import Faulty, differences, make_faulty_task
from loop_cases import make_value_model, ppo_yaml

from hotseat.config import loads
from hotseat.faults import Fault
from hotseat.loop.run import start

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(1200)]

PLACEMENT = "{actor: 0, 'reference,rollout': '@actor', critic: 1, reward: 2}"


def config_text(task, name: str, cluster: str) -> str:
    return ppo_yaml(
        task,
        name=name,
        cluster=cluster,
        reward=f"{{model: {task}/reward_model}}",
        checkpoint="{every: 1}",
        run="{max_restarts: 0}",
        train="{dtype: fp32, batch_size: 16, micro_batch_size: 4, num_episodes: 2}",
    )


# In the third step: the checkpoint of the second waits for that of the first, so there is one by then.
@pytest.mark.parametrize(
    "fault",
    [
        Fault("update.micro-batch", "kill", by="critic:0", skip=8),
        Fault("prepare.before", "kill", to="reward:0", skip=2),
        Fault("save.during", "kill", by="critic:0", skip=2),
    ],
)
def test_a_critic_or_a_reward_model_dies_and_the_run_resumes_from_its_checkpoint(tmp_path, fault):
    """Scenario 8: they end a run as ranks of the actor do."""
    task = make_faulty_task(tmp_path)
    make_value_model(task / "reward_model")
    start(loads(config_text(task, "undisturbed", "{runtime: local}")))
    with Faulty(task, num_passes=2) as run:
        (task / "disturbed.yaml").write_text(config_text(task, "disturbed", f"{{component_placement: {PLACEMENT}}}"))
        run.arm(fault)
        code, out, errors = run.go(timeout_s=860)
        assert code != 0
        assert run.all_happened(), out + errors[-2000:]
        assert run.seconds_since_last_fault() < 15
        assert "resume after step" in errors
        assert run.is_gone(within_s=10)
        code, _, errors = run.go(timeout_s=860)
        assert code == 0, errors[-3000:]
        assert differences(task / "runs" / "undisturbed", run.run_dir) == []
