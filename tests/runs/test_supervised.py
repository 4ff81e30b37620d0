"""Training on examples, as a group and as ranks of a launcher."""

import os
import sys
from pathlib import Path

import preloaded
import pytest
from loop_cases import make_task, sft_yaml, weights
from rank_cases import meeting
from safetensors.torch import load_file
from weight_changes import assert_changed_alike

from hotseat.config import loads
from hotseat.loop.run import start
from hotseat.observe import read_lines

pytestmark = pytest.mark.slow


def test_the_loss_falls_and_the_model_is_exported(task):
    final = start(loads(sft_yaml(task)))
    records = read_lines(task / "runs" / "sft" / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(9))  # before training, and 8 rows x 4 epochs / 4
    assert records[0].keys() == {"step", "eval/loss"}
    assert records[-1]["eval/loss"] < records[0]["eval/loss"] - 0.2
    assert records[-1]["loss"] < records[1]["loss"] - 0.2
    assert final["eval/loss"] == records[-1]["eval/loss"]
    assert weights(task, "sft")


def test_deepspeed_learns_the_same(task):
    start(loads(sft_yaml(task)))
    start(loads(sft_yaml(task, name="zero"), ["train.backend=deepspeed", "train.deepspeed.zero_stage=3"]))
    before = load_file(task / "model" / "model.safetensors")
    assert_changed_alike(before, weights(task, "sft"), weights(task, "zero"), 1e-4)


@pytest.mark.timeout(1200)
def test_ranks_of_a_launcher_agree_with_one_process(task):
    """No Ray: two processes, each is one rank."""
    agree_with_one_process(task)


@pytest.mark.timeout(1200)
@pytest.mark.long
def test_ranks_that_share_layers_agree_with_one_process(tmp_path):
    task = make_task(tmp_path, num_key_value_heads=2)
    train = "{dtype: fp32, batch_size: 4, max_epochs: 4, backend: deepspeed, deepspeed: {tensor_parallel_size: 2}}"
    agree_with_one_process(task, train=train)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "train", ["{max_tokens_per_device: 20}", "{max_tokens_per_device: 12, sequence_parallel_size: 2}"]
)
def test_token_budgets_and_shared_sequences_change_nothing(task, train):
    agree_with_one_process(task, train=f"{{dtype: fp32, batch_size: 4, max_epochs: 4, {train[1:-1]}}}")


def agree_with_one_process(task: Path, **changes: str) -> None:
    start(loads(sft_yaml(task)))
    config = task / "launched.yaml"
    config.write_text(sft_yaml(task, name="launched", **changes))
    script = task / "rank.py"
    script.write_text(
        "import sys\nfrom hotseat.config import load\nfrom hotseat.loop.run import start\n"
        "start(load(sys.argv[1]), launched=True)\nassert 'ray' not in sys.modules\n"
    )
    with meeting(2) as environments:
        ranks = [
            preloaded.popen(
                [sys.executable, str(script), str(config)],
                env={**os.environ, **own, "LOCAL_RANK": str(rank)},
                stdout=preloaded.DEVNULL,
                stderr=preloaded.PIPE,
                text=True,
            )
            for rank, own in enumerate(environments)
        ]
        try:
            errors = [process.communicate(timeout=860)[1] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(error[-2000:] for error in errors)
    before = load_file(task / "model" / "model.safetensors")
    assert_changed_alike(before, weights(task, "sft"), weights(task, "launched"), 1e-4)
