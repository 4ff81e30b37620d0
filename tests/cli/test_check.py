"""`hotseat check`: what it finds on this machine, and how it judges the nodes of a cluster."""

import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import preloaded
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from hotseat.checks import findings as checks
from hotseat.checks.findings import Finding, findings
from hotseat.cli.check_command import show
from hotseat.cli.cluster_check import node_findings, pairs
from hotseat.cli.cluster_runs import (
    STEPS,
    ShortRun,
    batch_for,
    judged,
    largest_gap,
    neighbours,
    short_runs,
    sizes_for,
)
from hotseat.cli.main import main
from hotseat.cli.new import write_files
from hotseat.cluster.node_facts import node_facts
from hotseat.cluster.ports import free_port
from hotseat.cluster.runtime import ClusterNode
from hotseat.config import load
from hotseat.config.batches import batch_algebra


def test_brackets_are_printed_as_they_are(capsys):
    finding = Finding("engine vllm", "not installed: 'hotseat[vllm]'", advice="pip install 'hotseat[vllm,deepspeed]'")
    assert show([finding], Console(width=120)) == 0
    printed = capsys.readouterr().out
    assert "not installed: 'hotseat[vllm]'" in printed
    assert "engine vllm: pip install 'hotseat[vllm,deepspeed]'\n" in printed


def test_this_machine_can_run(capsys):
    assert main(["check"]) == 0
    printed = capsys.readouterr().out
    for what in ("Hotseat", "torch", "transformers", "ray", "/dev/shm", "engine vllm", "backend deepspeed", "devices"):
        assert what in printed


def test_what_is_missing_comes_with_advice(monkeypatch, tmp_path):
    monkeypatch.setattr(checks, "_version", lambda package: None)
    monkeypatch.setattr(checks.shutil, "which", lambda name: None)
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20))
    monkeypatch.setattr(checks.resource, "getrlimit", lambda limit: (1024, 524288))
    found = {finding.what: finding for finding in findings()}
    assert found["torch"] == Finding(
        "torch", "not installed", "install Hotseat with its dependencies: docs/install.md", stops=True
    )
    assert "pip install hotseat[deepspeed]" in found["backend deepspeed"].advice
    assert "apt-get install gcc" in found["C compiler"].text
    assert found["sandbox"].advice.startswith("apt-get install bubblewrap")
    assert "--shm-size" in found["/dev/shm"].advice
    assert "TMPDIR" in found["temporary files"].advice
    assert found["open files"].advice.startswith("ulimit -n 65536")
    assert [finding.what for finding in found.values() if finding.stops] == ["torch", "transformers", "ray"]


def test_a_gpu_that_torch_does_not_see_stops_runs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(checks, "device_memory", lambda name: object())
    [finding] = checks.devices()
    assert finding.stops
    assert "install a torch for CUDA" in finding.advice


def test_the_code_is_2_if_something_stops_runs(monkeypatch, capsys):
    monkeypatch.setattr(checks, "CHECKS", (lambda: iter([Finding("x", "bad", "mend it", stops=True)]),))
    assert main(["check"]) == 2
    assert "x: mend it" in capsys.readouterr().out
    monkeypatch.setattr(checks, "CHECKS", (lambda: iter([Finding("x", "so so", "mend it")]),))
    assert main(["check"]) == 0


def test_a_config_is_checked_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "sft", "."]) == 0
    assert main(["check", "sft.yaml"]) == 0
    assert "nothing that shows without data or models would stop" in capsys.readouterr().out
    assert main(["check", "sft.yaml", "data.path=missing.jsonl"]) == 2
    assert "data.path: no such file or folder: missing.jsonl" in capsys.readouterr().err


def test_a_cluster_needs_an_address(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(["check", "--cluster", str(tmp_path)]) == 2
    assert "RAY_ADDRESS is not set" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def cluster_with(place, change):
    """A cluster of two nodes, of which the second has what this machine has, but for a change."""

    def facts(nodes, paths):
        own = node_facts(None, paths)
        return {0: own, 1: change(own)}

    nodes = (ClusterNode(0, 1, "10.0.0.1", "one"), ClusterNode(1, 1, "10.0.0.2", "two"))
    return SimpleNamespace(home=0, nodes=nodes, facts=facts)


def test_nodes_are_compared_with_the_drivers(tmp_path):
    fine = list(node_findings(cluster_with(tmp_path, lambda facts: facts), tmp_path))
    assert [(finding.what, finding.advice) for finding in fine] == [("node 0", ""), ("node 1", "")]

    def other(facts):
        versions = {**facts.versions, "torch": "1.0"}
        return replace(facts, versions=versions, paths={str(tmp_path): None}, clock_s=facts.clock_s - 600)

    _, second = node_findings(cluster_with(tmp_path, other), tmp_path)
    assert second.stops
    for text in ("has torch 1.0", "its clock is apart", f"does not see {tmp_path}"):
        assert text in second.advice


def test_weights_are_compared_relative_to_the_largest_of_each(tmp_path):
    weights = {"a": torch.tensor([1.0, -4.0]), "b": torch.zeros(3)}
    for name, change in (("one", 0.0), ("two", 0.02)):
        (tmp_path / name).mkdir()
        save_file({**weights, "a": weights["a"] + change}, tmp_path / name / "model.safetensors")
    assert largest_gap(tmp_path / "one", tmp_path / "two") == pytest.approx(0.005)
    assert largest_gap(tmp_path / "one", tmp_path / "one") == 0
    save_file({"a": weights["a"]}, tmp_path / "two" / "model.safetensors")
    assert largest_gap(tmp_path / "one", tmp_path / "two") == float("inf")


def rl_run(folder, weight, gap):
    (folder / "model").mkdir(parents=True)
    save_file({"a": torch.tensor([weight])}, folder / "model" / "model.safetensors")
    (folder / "metrics.jsonl").write_text(f'{{"step": 1}}\n{{"step": 2, "engine_gap": {gap}}}\n')
    return folder


def test_runs_are_judged_by_engines_and_by_the_run_that_they_have_to_equal(tmp_path):
    one, other = rl_run(tmp_path / "one", 1.0, 1e-6), rl_run(tmp_path / "other", 1.1, 0.5)
    run = ShortRun("pushed by gloo", "rl", (), like="pushed")
    [fine] = judged(run, one, one, 3.0)
    assert not fine.stops
    assert "1.0e-06 apart" in fine.text
    [wrong] = judged(run, other, one, 3.0)
    assert wrong.stops
    assert "engine and trainer are further apart" in wrong.advice
    assert "learned another model than pushed" in wrong.advice
    [not_a_number] = judged(run, rl_run(tmp_path / "nan", 1.0, "NaN"), None, 3.0)
    assert not_a_number.stops


def test_a_cluster_gets_the_runs_that_its_devices_allow():
    assert [neighbours(nodes) for nodes in ([0], [0, 1], [0, 0, 1], [0, 1, 1])] == [None, None, (0, 1), (1, 2)]
    alone, apart, pairs_of_two = ({run.what.strip() for run in short_runs(nodes)} for nodes in ([0], [0, 1], [0, 0, 1]))
    assert apart - alone == {"GRPO, weights pushed", "pushed by gloo"}
    assert pairs_of_two - apart == {"over two devices"}


def test_batches_of_the_runs_divide_over_any_number_of_devices(tmp_path):
    write_files("sft", tmp_path)
    write_files("rl", tmp_path)
    for count in (1, 2, 3, 7, 16, 24, 100):
        for name, settings in sizes_for(count).items():
            config = load(tmp_path / f"{name}.yaml", settings)
            made = batch_algebra(config, count, STEPS * batch_for(count))
            assert made.num_steps == STEPS


def test_every_pair_of_nodes_is_measured_once():
    assert list(pairs(1)) == []
    assert list(pairs(3)) == [(0, 1), (0, 2), (1, 2)]


WORKER = """
from hotseat.cluster.links import BLOCK_BYTES, LinkWorker
worker = LinkWorker("cpu", 300.0)
link = worker.link(0, 1)
assert link.latency_s > 0 and link.bytes_per_s > 0
assert worker.all_reduce() > 0
worker.close()
print("done")
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_measure_their_link_and_a_sum():
    port = free_port("127.0.0.1")
    ranks = [
        preloaded.popen(
            [sys.executable, "-c", WORKER],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
            },
            stdout=preloaded.PIPE,
            stderr=preloaded.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [rank.communicate(timeout=500)[0] for rank in ranks]
    assert [text.splitlines()[-1] for text in printed] == ["done", "done"], printed
