"""What a run shows on its way to the first step."""

import json
import os
import re
import time
from types import SimpleNamespace

import pytest
from loop_cases import make_task, rl_yaml

from hotseat.cli.main import main
from hotseat.cluster import activity
from hotseat.loop.care import doing_in
from hotseat.loop.start import make_view


def test_processes_that_start_are_named_with_what_they_do(tmp_path, monkeypatch):
    monkeypatch.setenv(activity.DIRECTORY, str(tmp_path))
    doing = [["its start", [], time.time()], ["vLLM loads the model and compiles", [], time.time()]]
    (tmp_path / "rollout-0").write_bytes(json.dumps(doing).encode() + b"\0")
    groups = {
        "rollout": SimpleNamespace(name="rollout", states=lambda: ["starting", "starting"]),
        "actor": SimpleNamespace(name="actor", states=lambda: ["running"]),
    }
    first, second = doing_in(SimpleNamespace(groups=groups))
    assert re.fullmatch(r"rollout 0: vLLM loads the model and compiles, for \d+\.\d s", first)
    assert second == "rollout 1: its process starts"


def test_of_launched_ranks_only_the_first_is_heard(monkeypatch, capsys):
    config = SimpleNamespace(task="sft")
    monkeypatch.setenv("RANK", "1")
    make_view(config, launched=True).stage("loading")
    assert capsys.readouterr().out == ""
    make_view(config, launched=False).stage("loading")
    monkeypatch.setenv("RANK", "0")
    make_view(config, launched=True).stage("loading")
    assert capsys.readouterr().out.count("  loading\n") == 2


@pytest.mark.slow
def test_every_stage_of_a_run_is_one_dated_line_in_a_pipe(tmp_path, capsys):
    task = make_task(tmp_path)
    (task / "run.yaml").write_text(rl_yaml(task))
    assert main(["run", str(task / "run.yaml")]) == 0
    stages = re.findall(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert stages == [
        "loading torch and transformers",
        "reading tokenizer and data",
        "preparing to run in this process",
        "starting processes, which load model: actor, rollout",
        "step 1: sending the weights to the engines",
        "step 1: evaluating",
        "step 1: sampling and scoring answers",
        "step 1: computing log-probs and advantages",
        "step 1: updating the weights",
        "step 1: sending the weights to the engines",
    ]
    assert os.environ.get(activity.DIRECTORY) is None
