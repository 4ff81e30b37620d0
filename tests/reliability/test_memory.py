"""Device memory that runs out among several ranks, where nothing can be made again."""

import re

import pytest
from fault_cases import TWO_RANKS, Faulty, make_faulty_task

from hotseat.config import load
from hotseat.faults import Fault

# Every sample has something to learn from.
REWARD = """
def reward_func(queries, prompts, labels):
    return [float(sum(map(ord, query)) % 101) for query in queries]
"""

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


def test_a_rank_among_several_that_runs_out_of_memory_ends_the_run_and_resume_uses_less(tmp_path):
    """Scenario 50: the error names the smaller budget, which is in the config of the run; resumed, it is used."""
    task = make_faulty_task(tmp_path)
    (task / "reward.py").write_text(REWARD)
    with Faulty(task, num_passes=2, placement=TWO_RANKS) as run:
        path = task / "disturbed.yaml"
        path.write_text(path.read_text().replace("micro_batch_size: 2", "chosen_tokens_per_device: 4096"))
        run.arm(Fault("update.forward", "out-of-memory", by="actor:1", skip=2))  # one micro-batch a step: in the third
        code, _, errors = run.go()
        assert code == 1, errors[-3000:]
        assert run.all_happened()
        named = re.search(r"out of device memory in an update with a micro-batch of (\d+) tokens", errors)
        smaller = re.search(r"go on with train.chosen_tokens_per_device (\d+)", errors)
        assert named, errors[-3000:]
        assert smaller, errors[-3000:]
        assert int(smaller[1]) == int(named[1]) // 2
        assert re.fullmatch(rf"go on after step \d: hotseat resume {run.run_dir}", errors.strip().splitlines()[-1])
        assert load(run.run_dir / "config.yaml").train.chosen_tokens_per_device == int(smaller[1])
        code, out, errors = run.go()
        assert code == 0, errors[-3000:]
        assert f"updates of at most {smaller[1]} tokens on a device" in " ".join(out.split())
