"""What a run shows on its way to the first step."""

import gc
import json
import os
import re
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from loop_cases import REWARD, make_task, rl_yaml

from hotseat.cli.main import main
from hotseat.cluster import Process, activity
from hotseat.cluster.on_ray.ray_group import RankProcess, RayGroup
from hotseat.cluster.worker_process import ProcessIdentity
from hotseat.config import loads
from hotseat.loop.start import make_view, without_collector, worker_modules
from hotseat.loop.state.watchdog import Readiness, doing_in
from hotseat.observe import read_lines

# As the reward function before it, but raises where every answer is the label, as in the trial call before a run.
REFUSES_LABELS = """
def reward_func(queries, prompts, labels, score=reward_func):
    if all(query == prompt + label for query, prompt, label in zip(queries, prompts, labels)):
        raise ValueError("that is the label")
    return score(queries, prompts, labels)
"""


def test_processes_that_start_are_named_with_what_they_do(tmp_path, monkeypatch):
    monkeypatch.setenv(activity.DIRECTORY, str(tmp_path))
    doing = [["its start", [], time.time()], ["compiling", [], time.time() - 23.2]]
    (tmp_path / "rollout-0").write_bytes(json.dumps(doing).encode() + b"\0")
    groups = {
        "rollout": SimpleNamespace(name="rollout", starting_ranks=lambda: [0, 1]),
        "actor": SimpleNamespace(name="actor", starting_ranks=list),
    }
    first, second = doing_in(SimpleNamespace(groups=groups))
    assert re.fullmatch(r"engine 0: compiling, \d+ s", first)
    assert second == "engine 1: starting its process"


def test_a_rank_that_is_ready_is_not_shown_as_starting_although_nobody_waits_for_its_group_yet(monkeypatch):
    monkeypatch.setenv(activity.DIRECTORY, "")
    made, under_way = Future(), Future()
    made.set_result(ProcessIdentity(4711, 0, "host"))
    starting = SimpleNamespace(futures={0: made, 1: under_way})
    processes = [RankProcess(Process(rank, 0)) for rank in range(2)]
    group = RayGroup("actor", processes, timeout_s=1, log_directory="", start=lambda *_: starting)
    group.begin(group.ranks, within_s=1)
    assert doing_in(SimpleNamespace(groups={"actor": group})) == ["actor 1: starting its process"]


class StartingGroup:
    """A group of which a test says when a rank is ready."""

    def __init__(self, name: str, size: int):
        self.name = name
        self.size = size
        self.ranks = range(size)

    def when_started(self, tell):
        self.tell = tell


def test_engines_are_announced_one_by_one_and_other_roles_when_all_their_ranks_are_ready():
    shown: list[str] = []
    engines, actor, agents = StartingGroup("rollout", 2), StartingGroup("actor", 2), StartingGroup("agents", 1)
    readiness = Readiness(shown.append)
    for group in (engines, actor, agents):
        readiness.watch(group, time.monotonic() - 12.34)
    for group, rank in ((actor, 1), (engines, 1), (agents, 0), (actor, 0), (actor, 0)):
        group.tell(rank)
    readiness.close()
    engines.tell(0)
    assert [re.sub(r"\d+\.\d s", "T s", line) for line in shown] == [
        "engine 1 ready after T s",
        "agents ready after T s",
        "actor ready after T s (2 ranks)",
    ]


def test_only_the_first_launched_rank_prints(monkeypatch, capsys):
    config = SimpleNamespace(task="sft")
    monkeypatch.setenv("RANK", "1")
    make_view(config, launched=True).stage("loading")
    assert capsys.readouterr().out == ""
    make_view(config, launched=False).stage("loading")
    monkeypatch.setenv("RANK", "0")
    make_view(config, launched=True).stage("loading")
    assert capsys.readouterr().out.count("  loading\n") == 2


def test_a_template_loads_what_the_workers_of_a_run_import(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    config = loads(f"task: rl\nactor: {{model: {tmp_path}}}\ntrain: {{backend: fsdp}}\n")
    modules = worker_modules(config)
    assert "transformers.models.qwen3.modeling_qwen3" in modules
    assert "hotseat.loop.workers.rollout_host" in modules
    assert "deepspeed" not in modules
    assert not any(name.split(".")[0] == "ray" for name in modules)  # it is loaded for the first worker


def test_the_collector_pauses_only_where_it_runs():
    with without_collector():
        assert not gc.isenabled()
        with without_collector():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.slow
def test_every_stage_of_a_run_is_one_dated_line_in_a_pipe(tmp_path, capsys):
    task = make_task(tmp_path)
    (task / "run.yaml").write_text(rl_yaml(task))
    (task / "reward.py").write_text(f"{REWARD}{REFUSES_LABELS}")
    assert main(["run", str(task / "run.yaml"), "reward.trial_timeout_s=120"]) == 0
    stages = re.findall(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert [re.sub(r"after \d+\.\d s", "after T s", stage) for stage in stages] == [
        f"calling {task / 'reward.py'} once, to see that it works",
        "loading torch and transformers",
        "reading tokenizer and data",
        "preparing to run in this process",
        "starting processes, which load model: actor, rollout",
        "engine 0 ready after T s",
        "actor ready after T s",
        "agents ready after T s",
        "step 1: sending the weights to the engines",
        "step 1: sampling and scoring answers",
        "step 1: computing log-probs and advantages",
        "step 1: updating the weights",
        "step 1: sending the weights to the engines",
    ]
    assert os.environ.get(activity.DIRECTORY) is None
    warnings = [event["text"] for event in read_lines(task / "runs/run/events.jsonl") if event["kind"] == "warning"]
    assert ["reward_func raised ValueError: that is the label" in text for text in warnings] == [True]
