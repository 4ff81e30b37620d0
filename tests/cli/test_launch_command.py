"""`hotseat launch`: the script for Slurm says what it should, and is refused where the run could not be placed."""

import subprocess

import pytest

from hotseat.cli.main import main
from hotseat.cluster.on_ray.waiting import wait_for_nodes
from hotseat.errors import RunError, UserError

CONFIG = """
task: rl
actor: {model: org/model}
reward: {function: exact_match}
data: {path: prompts.jsonl}
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rl.yaml").write_text(CONFIG)
    return "rl.yaml"


def script(capsys, *words):
    assert main(["launch", "slurm", *words]) == 0
    return capsys.readouterr().out


def test_the_script_has_nodes_devices_and_the_run(config, capsys):
    words = ("--nodes", "4", "--gpus-per-node", "8", "--cpus-per-node", "64", "--sbatch=--time=24:00:00")
    text = script(capsys, config, *words, "--setup", "module load cuda", "data.input_key=a b", "name=mine")
    directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert directives == [
        *("--job-name=mine", "--nodes=4", "--ntasks-per-node=1", "--cpus-per-task=64", "--gpus-per-node=8"),
        *("--time=24:00:00", "--open-mode=append", "--requeue", "--signal=B:TERM@300"),
    ]
    assert text.index("module load cuda") < text.index("set -u") < text.index("ray start")
    assert text.count("--num-gpus=8 --num-cpus=64") == 2
    assert "srun --nodes=3 --ntasks=3 " in text
    run = "hotseat run rl.yaml 'data.input_key=a b' name=mine cluster.num_nodes=4 checkpoint.resume=true &"
    assert run in text.splitlines()
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_a_single_node_has_no_workers_and_a_job_keeps_its_name(config, capsys):
    text = script(capsys, config, "--nodes", "1", "--gpus-per-node", "0")
    assert "srun" not in text
    assert "--gpus-per-node" not in text.split("\n", 2)[2]
    assert 'name="slurm-$SLURM_JOB_ID"' in text


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--nodes", "0", "--gpus-per-node", "8"), "--nodes 0: must be at least 1"),
        (("--nodes", "2", "--gpus-per-node", "8", "cluster.num_nodes=3"), "cluster.num_nodes is 3, but --nodes is 2"),
        (("--nodes", "2", "--gpus-per-node", "8", "cluster.runtime=local"), "on several nodes it has to be ray"),
        (
            ("--nodes", "2", "--gpus-per-node", "1", "cluster.component_placement.actor=0-7"),
            "the inventory has 2 devices",
        ),
    ],
)
def test_what_could_not_run_is_refused_before_it_is_queued(config, capsys, words, problem):
    assert main(["launch", "slurm", config, *words]) == 2
    assert problem in capsys.readouterr().err


def test_a_run_without_checkpoints_has_a_note(config, capsys):
    words = ["launch", "slurm", config, "--nodes", "1", "--gpus-per-node", "1", "checkpoint.every_minutes=0"]
    assert main(words) == 0
    assert "note: no checkpoints are made" in capsys.readouterr().err
    assert main(words[:-1]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("address", ["", "auto"])
def test_waiting_for_nodes_needs_an_address(monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UserError, match="set it to the host:port of the cluster's head"):
        wait_for_nodes(2)


def test_waiting_for_nodes_ends(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(RunError, match="no Ray cluster answers at 127.0.0.1:1 after 0 s"):
        wait_for_nodes(2, timeout_s=0)
