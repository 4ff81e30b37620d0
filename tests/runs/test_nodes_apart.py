"""Runs across nodes that are really apart: own network, host name, processes, `/tmp` and `/dev/shm`."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from apart import is_possible, no_loss, nodes
from environments import own_environment

from hotseat.cli.cluster_runs import short_runs
from hotseat.loop.state.checkpoints import CheckpointStore

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not is_possible(), reason="namespaces with links need root and Linux's tools"),
]
PORT = 6379
BINARIES = Path(sys.executable).parent
EVERYWHERE = (
    "train.dtype=fp32",
    "cluster.num_nodes=2",
    'cluster.component_placement={"actor": "0-1", "rollout": "0-1"}',
    "eval.path=null",
    "eval.every=null",
)


def join(node, head):
    """Start Ray on a node by the documented command."""
    where = (
        ["--head", f"--port={PORT}", "--include-dashboard=false"]
        if node is head
        else ["--address", head.env["RAY_ADDRESS"]]
    )
    sizes = ("--num-gpus=1", "--num-cpus=2", "--object-store-memory=200000000")
    env = {key: value for key, value in node.env.items() if key != "RAY_ADDRESS"}
    node.run("ray", "start", *where, "--node-ip-address", node.address, *sizes, env=env)


@contextlib.contextmanager
def started(folder, count):
    """Start nodes with one logical device each, and Ray on them; make a task in a folder that all have."""
    with nodes(count, shared=[folder]) as made:
        head = made[0]
        env = own_environment("WANDB_") | {
            "PATH": f"{BINARIES}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "HF_HUB_OFFLINE": "1",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ADDRESS": f"{head.address}:{PORT}",
            "RAY_raylet_start_wait_time_s": "600",
        }
        for node in made:
            node.env = env
            join(node, head)
        for kind in ("rl", "sft"):
            head.run("hotseat", "new", kind, folder / "task")
        yield folder / "task", *made


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with started(tmp_path_factory.mktemp("two"), 2) as made:
        yield made


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    with started(tmp_path_factory.mktemp("three"), 3) as made:
        yield made


def command(task, *words):
    return ["env", "-C", str(task), "hotseat", *words]


def records(run):
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_run_across_two_nodes_learns_by_relative_paths(cluster):
    task, head, other = cluster
    done = head.run(*command(task, "run", "rl.yaml", "name=whole", "train.num_episodes=2", *EVERYWHERE), check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert [record["step"] for record in records(task / "runs" / "whole")][-1] == 8
    assert (task / "runs" / "whole" / "model" / "config.json").is_file()
    assert "hotseat" not in other.run("ps", "-eo", "args").stdout  # nothing of ours is left there


def test_a_cluster_is_checked_by_links_sums_and_runs(cluster):
    task, head, _ = cluster
    done = head.run(*command(task, "check", "--cluster", task / "checked"), check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for what in (
        "node 0",
        "node 1",
        "nodes 0 and 1",
        "sum over all devices",
        *(run.what for run in short_runs([0, 1])),
    ):
        assert f"✓  {what}" in done.stdout, done.stdout


def test_a_folder_that_is_not_shared_is_refused_before_processes_start(cluster):
    task, head, other = cluster
    other.hide(task)
    try:
        done = head.run(*command(task, "run", "rl.yaml", "name=hidden", *EVERYWHERE), check=False)
    finally:
        other.unhide(task)
    assert done.returncode == 2, done.stdout[-4000:] + done.stderr[-4000:]
    where = f"node 1 ({other.name}, {other.address})"
    assert f"actor.model: {where} has no tiny_model" in done.stderr
    assert f"reward.function: {where} has no reward.py" in done.stderr
    assert "starting processes" not in done.stdout


def test_links_that_lose_packets_do_not_end_a_run(cluster):
    if reason := no_loss():
        pytest.skip(reason)
    task, head, other = cluster
    for node in (head, other):
        node.lose(2)
    try:
        words = command(task, "run", "rl.yaml", "name=lossy", "train.num_episodes=1", *EVERYWHERE)
        done = head.run(*words, check=False)
        lost = [node.num_lost() for node in (head, other)]
    finally:
        for node in (head, other):
            node.lose_nothing()
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert [record["step"] for record in records(task / "runs" / "lossy")][-1] == 4
    assert min(lost) > 0


def test_a_node_that_is_cut_off_ends_the_run_with_its_name_and_another_run_resumes(cluster):
    task, head, other = cluster
    words = command(
        task,
        "run",
        "rl.yaml",
        "name=cut",
        "train.num_episodes=40",
        "checkpoint.every=2",
        "run.max_restarts=0",
        *EVERYWHERE,
    )
    run = head.start(*words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    saved = CheckpointStore(task / "runs" / "cut" / "checkpoints")
    while not saved.steps():
        assert run.poll() is None, run.stdout.read()[-4000:]
        time.sleep(0.2)
    other.cut_off()
    printed = run.communicate(timeout=1800)[0]
    assert run.returncode == 75, printed[-4000:]
    assert f"node 1 ({other.name}, {other.address})" in printed, printed[-4000:]
    assert "hotseat resume runs/cut" in printed, printed[-4000:]
    other.connect()
    other.run("ray", "stop", "--force", check=False)
    join(other, head)
    last = records(task / "runs" / "cut")[-1]["step"]
    resumed = head.start(*command(task, "resume", "runs/cut"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    while records(task / "runs" / "cut")[-1]["step"] < last + 3:
        assert resumed.poll() is None, resumed.stdout.read()[-4000:]
        time.sleep(0.2)
    driver = psutil.Process(resumed.pid).children()[0]
    driver.send_signal(signal.SIGTERM)
    printed = resumed.communicate(timeout=600)[0]
    steps = [record["step"] for record in records(task / "runs" / "cut")]
    assert steps == sorted(set(steps)), printed[-4000:]


def begun(task, head, name, *settings):
    """Start a run that prints into a file, and return both when it has saved a checkpoint."""
    settings = (f"name={name}", "train.num_episodes=40", "checkpoint.every=2", *EVERYWHERE, *settings)
    run, printed = printing(task, head, "run", "rl.yaml", *settings)
    saved = CheckpointStore(task / "runs" / name / "checkpoints")
    wait_until(run, printed, saved.steps)
    return run, printed


def printing(task, head, *words):
    path = task / f"{secrets.token_hex(4)}.log"
    with path.open("w") as log:
        run = head.start(*command(task, *words), stdout=log, stderr=subprocess.STDOUT)
    return run, path.read_text


def wait_until(run, printed, condition):
    while not condition():
        assert run.poll() is None, printed()[-4000:]
        time.sleep(0.2)


def stop_after_steps(run, printed, metrics):
    """Stop a run when it has made three more steps. Fails if a step is in its metrics twice."""
    last = records(metrics)[-1]["step"]
    wait_until(run, printed, lambda: records(metrics)[-1]["step"] >= last + 3)
    psutil.Process(run.pid).children()[0].send_signal(signal.SIGTERM)
    run.wait(timeout=1800)
    steps = [record["step"] for record in records(metrics)]
    assert steps == sorted(set(steps)), printed()[-4000:]


def test_a_run_whose_node_dies_for_good_begins_again_on_a_spare_one(tmp_path):
    with started(tmp_path, 3) as (task, head, *others):
        run, printed = begun(task, head, "spare")
        lost = others[0]
        lost.end()
        wait_until(run, printed, lambda: "started again" in printed())
        assert f"Ray has lost node 1 ({lost.name}, {lost.address})" in printed()
        stop_after_steps(run, printed, task / "runs" / "spare")


def test_a_run_whose_node_dies_for_good_is_given_up_and_resumed_on_what_is_left(tmp_path):
    with started(tmp_path, 2) as (task, head, lost):
        run, printed = begun(task, head, "left", "run.max_restarts=1")
        lost.end()
        assert run.wait(timeout=1800) == 75, printed()[-4000:]
        assert f"Ray has lost node 1 ({lost.name}, {lost.address})" in printed()
        assert "resume it with: hotseat resume runs/left" in printed()
        settings = ("cluster.num_nodes=1", 'cluster.component_placement={"actor": "0", "rollout": "0"}')
        run, printed = printing(task, head, "resume", "runs/left", *settings)
        stop_after_steps(run, printed, task / "runs" / "left")


WAYS = {
    "sft": ("sft.yaml", "train.batch_size=12", "train.max_epochs=1", "cluster.component_placement.actor=all"),
    "ppo": (
        "rl.yaml",
        "train.num_episodes=2",
        "algorithm.estimator=gae",
        "algorithm.kl.coef=0.01",
        'cluster.component_placement={"actor": "0-1", "critic": "1-2", "rollout": "2"}',
    ),
    "async": (
        "rl.yaml",
        "train.num_episodes=2",
        "overlap.staleness=1",
        "overlap.in_flight=recompute",
        'cluster.component_placement={"actor": "0-1", "rollout": "2"}',
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_three_nodes_train(three, way):
    task, head, *others = three
    settings = (f"name={way}", "train.dtype=fp32", "eval.path=null", "eval.every=null")
    done = head.run(*command(task, "run", *WAYS[way], *settings), check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    steps = [record["step"] for record in records(task / "runs" / way)]
    assert steps == list(range(steps[0], steps[-1] + 1))
    assert (task / "runs" / way / "model" / "config.json").is_file()
    for node in others:
        assert "hotseat" not in node.run("ps", "-eo", "args").stdout
        assert node.run("sh", "-c", "ls -d /tmp/hotseat-* || true").stdout == ""


LINKS = """
from hotseat.cli.cluster_check import link_findings
from hotseat.cluster import Cluster
from hotseat.placement.locate import Process

with Cluster(timeout_s=300.0) as cluster:
    everyone = [Process(rank, node.rank) for rank, node in enumerate(cluster.nodes)]
    cluster.reserve(everyone)
    names = [node.hostname for node in cluster.nodes]
    for found in link_findings(cluster, everyone):
        first, second = (names[int(word)] for word in found.what.split() if word.isdigit())
        print(*sorted((first, second)), bool(found.advice), found.text, sep="|")
"""


def test_a_slow_link_is_named(three):
    _, head, _, last = three
    last.limit("20mbit")
    try:
        done = head.run("python", "-c", LINKS)
    finally:
        last.unlimit()
    lines = [line.split("|") for line in done.stdout.splitlines() if line.startswith("node")]
    named = {(first, second): is_named == "True" for first, second, is_named, _ in lines}
    assert named == {("node1", "node2"): False, ("node1", "node3"): True, ("node2", "node3"): True}, done.stdout


STUBS = {
    "scontrol": """
case $1 in
    requeue) echo "$2" >> "$QUEUE/requeued";;
esac
""",
    # Slurm starts it on the other nodes; here the test does, which can enter them.
    "srun": """
while [ "${1#--}" != "$1" ]; do shift; done
env --null > "$QUEUE/exported"
printf '%s\\0' "$@" > "$QUEUE/wanted.new"
mv "$QUEUE/wanted.new" "$QUEUE/wanted"
sleep infinity
""",
}


def test_the_script_for_slurm_starts_ray_and_the_run_and_queues_the_job_again(tmp_path):
    """The job is stopped before its time limit, and resumes from the step that it saved."""
    for name, text in STUBS.items():
        stub = tmp_path / "bin" / name
        stub.parent.mkdir(exist_ok=True)
        stub.write_text(f"#!/bin/bash\n{text}")
        stub.chmod(0o755)
    path = f"{tmp_path / 'bin'}:{BINARIES}:{os.environ['PATH']}"
    env = own_environment("WANDB_") | {
        "PATH": path,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "HF_HUB_OFFLINE": "1",
        "SLURM_JOB_ID": "77",
        "SLURMD_NODENAME": "node1",
        "QUEUE": str(tmp_path),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    subprocess.run(["hotseat", "new", "rl", tmp_path / "task"], env=env, check=True, capture_output=True)
    words = ("--nodes", "2", "--gpus-per-node", "1", "--cpus-per-node", "2", "train.num_episodes=40", *EVERYWHERE)
    made = subprocess.run(
        [
            "hotseat",
            "launch",
            "slurm",
            "rl.yaml",
            *(word for word in words if not word.startswith("cluster.num_nodes")),
        ],
        env=env,
        cwd=tmp_path / "task",
        check=True,
        capture_output=True,
        text=True,
    )
    (tmp_path / "task" / "job.sh").write_text(made.stdout)
    metrics = tmp_path / "task" / "runs" / "slurm-77"
    lasts = [run_job(tmp_path, env, metrics, restarts) for restarts in range(2)]
    assert (tmp_path / "requeued").read_text() == "77\n77\n"
    steps = [record["step"] for record in records(metrics)]
    assert steps == list(range(len(steps)))  # from the evaluation before step 1; none was lost, none made twice
    assert lasts[1] > lasts[0]


def test_the_task_for_skypilot_runs_on_its_nodes_and_ends_on_all(tmp_path):
    """With its variables set as SkyPilot sets them, and sizes for this machine in the config."""
    task = yaml.safe_load((Path(__file__).parents[2] / "examples" / "clusters" / "skypilot.yaml").read_text())
    env = own_environment("WANDB_") | {
        "PATH": f"{BINARIES}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    subprocess.run(["hotseat", "new", "rl", tmp_path], env=env, check=True, capture_output=True)
    config = yaml.safe_load((tmp_path / "rl.yaml").read_text())
    config["train"] |= {"num_episodes": 1, "dtype": "fp32"}
    config["cluster"] = {"component_placement": {"actor,rollout": "all"}}
    (tmp_path / "rl.yaml").write_text(yaml.safe_dump(config))
    with nodes(2, shared=[tmp_path]) as made:
        set_up = {
            **env,
            **task["envs"],
            "RUNS": str(tmp_path / "runs"),
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "SKYPILOT_NODE_IPS": "\n".join(node.address for node in made),
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        }
        jobs = []
        for rank, node in enumerate(made):
            node.env = {**set_up, "SKYPILOT_NODE_RANK": str(rank)}
            with (tmp_path / f"{rank}.log").open("w") as log:
                words = ("env", "-C", tmp_path, "bash", "-c", task["run"])
                jobs.append(node.start(*words, stdout=log, stderr=subprocess.STDOUT))
        printed = (tmp_path / "0.log").read_text
        assert jobs[0].wait(timeout=1800) == 0, printed()[-4000:]
        assert jobs[1].wait(timeout=600) == 0, (tmp_path / "1.log").read_text()[-4000:]
    assert [record["step"] for record in records(tmp_path / "runs" / "first")][-1] == 4, printed()[-4000:]


def run_job(folder, env, metrics, restarts):
    """Run the job on two new nodes for two steps, stop it as Slurm does, and return the last step."""
    (folder / "wanted").unlink(missing_ok=True)
    before = len(records(metrics))
    with nodes(2, shared=[folder]) as (first, other):
        first.env = other.env = {**env, "SLURM_RESTART_COUNT": str(restarts)}
        pid = folder / "pid"
        script = f"echo $$ > {pid}; exec bash job.sh"
        with (folder / f"job-{restarts}.log").open("w") as log:
            words = ("env", "-C", folder / "task", "bash", "-c", script)
            job = first.start(*words, stdout=log, stderr=subprocess.STDOUT)
        printed = (folder / f"job-{restarts}.log").read_text
        other_ray = None
        while len(records(metrics)) < before + 2:
            assert job.poll() is None, printed()[-4000:]
            if other_ray is None and (folder / "wanted").exists():
                wanted = (folder / "wanted").read_text().split("\0")[:-1]
                other.env = {**other.env, **exported(folder)}
                other_ray = other.start(*wanted, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            time.sleep(0.2)
        first.run("kill", "-TERM", pid.read_text().strip())
        assert job.wait(timeout=900) == 130, printed()[-4000:]
    return records(metrics)[-1]["step"]


def exported(folder):
    """Return what the script exports, which srun hands on."""
    entries = (folder / "exported").read_text().split("\0")
    values = dict(entry.split("=", 1) for entry in entries if "=" in entry)
    return {name: values[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS")}
