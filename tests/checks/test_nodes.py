"""What a node of the cluster lacks is said before a process starts there."""

import re
from dataclasses import replace

import pytest

from hotseat.checks.nodes import NodesContext, alike, memory_snapshots, roles_by_node
from hotseat.checks.pipeline import NODES
from hotseat.checks.stage import run_checks
from hotseat.cluster.node_facts import node_facts
from hotseat.cluster.runtime import ClusterNode
from hotseat.config import loads
from hotseat.errors import UserError
from hotseat.planning.config_plan import make_plan

HOSTS = (ClusterNode(0, 1, "10.0.0.1", "one"), ClusterNode(1, 1, "10.0.0.2", "two"))
CONFIG = """
task: rl
actor: {model: model}
reward: {function: "reward.py:score"}
data: {path: prompts.jsonl}
cluster: {num_nodes: 2, component_placement: {actor: "%s", rollout: "0-1"}}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A task whose model has a config and large weights."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with (tmp_path / "model" / "weights.safetensors").open("wb") as file:
        file.truncate(3 << 20)
    (tmp_path / "reward.py").write_text("def score(queries, prompts, labels): ...\n")
    return tmp_path


def context_of(folder, change=lambda facts: facts, actor="0-1", nodes=HOSTS):
    """A context in which node 1 has what this machine has, but for a change."""
    config = loads(CONFIG % actor)
    asked = []

    def ask(numbers, paths):
        asked.append((list(numbers), list(paths)))
        facts = node_facts(str(folder), paths)
        return {number: change(facts) if number else facts for number in numbers}

    return NodesContext(config=config, plan=make_plan(config, "2x1"), nodes=nodes, home=0, ask=ask), asked


def problems(folder, change=lambda facts: facts, **options):
    return [str(problem) for problem in alike(context_of(folder, change, **options)[0])]


def test_nodes_that_are_alike_have_no_problem(folder):
    context, asked = context_of(folder)
    assert list(alike(context)) == []
    assert asked == [([0, 1], ["model", "reward.py"])]
    assert context.notes == []


def test_a_run_on_the_drivers_node_asks_nobody(folder):
    context, asked = context_of(folder)
    config = loads((CONFIG % "0").replace('rollout: "0-1"', 'rollout: "0"'))
    assert list(alike(replace(context, config=config, plan=make_plan(config, "2x1")))) == []
    assert asked == []


def test_memory_snapshots_need_all_that_train_on_the_drivers_node(folder):
    def problems(actor: str, home: int = 0) -> list[str]:
        context, _ = context_of(folder, actor=actor)
        section = context.config.checkpoint.model_copy(update={"memory_every": 1})
        config = context.config.model_copy(update={"checkpoint": section})
        plan = make_plan(loads(CONFIG % actor), "2x1")
        return [str(problem) for problem in memory_snapshots(replace(context, config=config, plan=plan, home=home))]

    assert problems("0") == []
    [problem] = problems("0-1")
    assert problem.startswith(
        "checkpoint.memory_every: actor or critic have ranks on node 1, and the driver is on node 0: memory snapshots"
    )
    assert len(problems("0", home=1)) == 1
    assert list(memory_snapshots(context_of(folder)[0])) == []


def test_files_that_another_node_lacks_are_named(folder):
    lacking = problems(folder, lambda facts: replace(facts, paths={**facts.paths, "reward.py": None}))
    advice = "share the folder, or copy it there under the same path"
    assert lacking == [f"reward.function: node 1 (two, 10.0.0.2) has no reward.py: {advice}"]
    nothing = problems(folder, lambda facts: replace(facts, paths=dict.fromkeys(facts.paths), has_folder=False))
    assert len(nothing) == 2
    assert f"has no model, nor the folder {folder}, from which relative paths start: share" in nothing[0]


def test_another_file_under_the_same_name_is_told_by_content_or_size(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (other / "model").mkdir()
    (other / "model" / "config.json").write_text("{}")
    (other / "reward.py").write_text("def score(queries, prompts, labels): return 1\n")
    with (other / "model" / "weights.safetensors").open("wb") as file:
        file.truncate(3 << 20)
    there = node_facts(str(other), ["model", "reward.py"])
    assert problems(folder, lambda facts: there) == [
        "reward.function: node 1 (two, 10.0.0.2) has another reward.py than the driver's node: copy the driver's there"
    ]
    with (other / "model" / "weights.safetensors").open("wb") as file:
        file.truncate((3 << 20) + 1)
    shorter = node_facts(str(other), ["model", "reward.py"])
    assert [problem.split(":")[0] for problem in problems(folder, lambda facts: shorter)] == [
        "actor.model",
        "reward.function",
    ]


def test_versions_differ(folder):
    def older(facts):
        return replace(facts, versions={**facts.versions, "torch": "2.1.0+cu121", "hotseat": "0", "deepspeed": "0.1"})

    found = problems(folder, older)
    assert len(found) == 2  # DeepSpeed is not used
    assert (
        found[0] == "node 1 (two, 10.0.0.2) has other code of hotseat than the driver's node: install the same on both"
    )
    assert re.fullmatch(
        r"node 1 \(two, 10.0.0.2\) has torch 2.1.0\+cu121, and 2\S+ is on the driver's node: install .*", found[1]
    )
    build = problems(folder, lambda facts: replace(facts, versions={**facts.versions, "torch": "9+cu1"}))
    assert len(build) == 1
    torch = node_facts(None, []).versions["torch"].partition("+")[0]
    assert problems(folder, lambda facts: replace(facts, versions={**facts.versions, "torch": f"{torch}+cu130"})) == []


@pytest.mark.parametrize(("seconds", "text"), [(6000, r"[56]\d{3} s ahead of"), (-6000, r"[56]\d{3} s behind")])
def test_a_clock_that_is_wrong_is_a_note(folder, seconds, text):
    context, _ = context_of(folder, lambda facts: replace(facts, clock_s=facts.clock_s + seconds))
    assert list(alike(context)) == []
    assert re.match(rf"the clock of node 1 \(two, 10.0.0.2\) is {text} the driver's: ", context.notes[0])


def test_only_nodes_that_load_a_file_need_it(folder):
    lacking = lambda facts: replace(facts, paths={**facts.paths, "model": None})  # noqa: E731
    assert problems(folder, lacking, actor="0")[0].startswith("actor.model: node 1")  # its engine loads it
    assert roles_by_node(context_of(folder, actor="0")[0].plan) == {0: {"actor", "rollout"}, 1: {"rollout"}}


def test_all_problems_are_one_error(folder):
    context, _ = context_of(folder, lambda facts: replace(facts, paths=dict.fromkeys(facts.paths)))
    with pytest.raises(UserError, match=r"(?s)this run cannot start:.*actor.model: node 1.*reward.function: node 1"):
        run_checks(context, NODES)
