"""Files for launchers name options that there are. `tests/runs/test_nodes_apart.py` runs what can be run of them."""

import shlex
from pathlib import Path

import yaml

from hotseat.cli.new import write_files
from hotseat.config import load

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"


def test_the_job_for_kuberay_starts_a_run_that_can_be_tried_again(tmp_path):
    job = yaml.safe_load((CLUSTERS / "kuberay.yaml").read_text())["spec"]
    words = shlex.split(job["entrypoint"])
    assert words[words.index("hotseat") :][:3] == ["hotseat", "run", "rl.yaml"]
    write_files("rl", tmp_path)
    config = load(tmp_path / "rl.yaml", words[words.index("rl.yaml") + 1 :])
    pods = [job["rayClusterSpec"]["headGroupSpec"], *job["rayClusterSpec"]["workerGroupSpecs"]]
    assert config.cluster.num_nodes == sum(pod.get("replicas", 1) for pod in pods)
    assert config.checkpoint.resume
    mounts = [mount["mountPath"] for mount in pods[0]["template"]["spec"]["containers"][0]["volumeMounts"]]
    assert any(str(config.run_dir).startswith(mount) for mount in mounts)
