"""Components of the user's own: classes that score and filter groups between rollout and update."""

import contextlib
import json
import math
from pathlib import Path

import pytest
import torch
from loop_cases import make_task, rl_yaml, same, weights

from hotseat.checks.function_trial import component_problem
from hotseat.cli.main import main
from hotseat.config import loads
from hotseat.errors import ConfigError, PlacementError, RunError
from hotseat.loop.rl.components import Components
from hotseat.loop.workers.component import ComponentSettings, ComponentWorker
from hotseat.loop.workers.experience import Share
from hotseat.loop.workers.group_facts import GroupFacts
from hotseat.planning.config_plan import flow_problem, make_plan
from hotseat.types import Episode, GroupChange, Prompt, PromptGroup, SampleKey, ScoredEpisode, Segment
from hotseat.user_functions import load_component

EXAMPLE = Path(__file__).parents[3] / "examples" / "components" / "variety.py"

# The reward of `make_task` counts sevens; here a component does, and the reward function gives nothing.
SEVENS = """
import os
from pathlib import Path

from hotseat import GroupChange


class Sevens:
    def __init__(self, log, drops=()):
        self.log, self.drops = Path(log), drops

    def note(self, what):
        with self.log.open("a") as file:
            file.write(f"{os.environ.get('RANK')} {what}\\n")

    def run(self, groups):
        self.note(f"run {len(groups)}")
        return [self.decide(group) for group in groups]

    def decide(self, group):
        if group.prompt.index in self.drops:
            return GroupChange(drop="its number")
        answers = [sample.episode.query.partition("=")[2] for sample in group.samples]
        rewards = [answer.count("7") / 4 for answer in answers]
        return GroupChange(rewards, metrics={"sevens": sum(rewards)})

    def offload(self):
        self.note("offload")

    def onload(self):
        self.note("onload")

    def close(self):
        self.note("close")
"""
NOTHING = "def reward_func(queries, prompts, labels):\n    return [0.0] * len(queries)\n"


@pytest.fixture
def task(tmp_path):
    made = make_task(tmp_path)
    (made / "sevens.py").write_text(SEVENS)
    (made / "nothing.py").write_text(NOTHING)
    return made


def run(task: Path, name: str, **changes: str) -> list[dict]:
    file = task / f"{name}.yaml"
    file.write_text(rl_yaml(task, name=name, **changes))
    assert main(["run", str(file)]) == 0
    return [json.loads(line) for line in (task / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def component(task: Path, **kwargs: object) -> str:
    arguments = ", ".join(f"{key}: {value}" for key, value in {"log": task / "log", **kwargs}.items())
    return f"{{path: {task}/sevens.py:Sevens, kwargs: {{{arguments}}}, enable_offload: true}}"


@pytest.mark.slow
def test_rewards_of_a_component_are_learned_as_those_of_a_reward_function(task):
    run(task, "plain")
    metrics = run(
        task,
        "own",
        reward=f"{{function: {task}/nothing.py}}",
        components=f"{{sevens: {component(task)}}}",
        cluster="{runtime: local, component_placement: {actor: 0, rollout: 0, sevens: 0}}",
        flow="[{name: sample, run: [rollout]}, {name: count, run: [sevens]}, {name: score, run: [actor]},"
        " {name: learn, train: [actor]}, {name: send, push: [rollout]}]",
    )
    assert same(weights(task, "own"), weights(task, "plain"))
    assert [line["components/sevens/groups"] for line in metrics[1:]] == [4.0, 4.0]
    assert metrics[1]["reward"] == pytest.approx(metrics[1]["components/sevens/sevens"] / 4)
    # Offloaded before the first rollout, and again when the actor works.
    notes = (task / "log").read_text().replace("None ", "").replace("0 ", "").splitlines()
    assert notes[:5] == ["offload", "onload", "run 4", "offload", "onload"]
    assert notes[-1] == "close"


@pytest.mark.long
@pytest.mark.slow
def test_an_evaluation_is_measured_by_the_components_that_ask_for_it(task):
    evaluation = f"{{path: {task}/prompts.jsonl, every: 1}}"
    plain = run(task, "plain", eval=evaluation)
    once = component(task)
    asking = once.replace("enable_offload: true", "evaluates: true")
    metrics = run(
        task,
        "asked",
        reward=f"{{function: {task}/nothing.py}}",
        eval=evaluation,
        components=f"{{sevens: {once}, again: {asking}}}",
    )
    measured = [{key: line[key] for key in line if key.startswith("eval/")} for line in metrics]
    num_prompts = len((task / "prompts.jsonl").read_text().splitlines())
    for line, own in zip(measured, plain, strict=True):
        assert line["eval/reward"] == own["eval/reward"] / 4  # the component counts sevens as quarters
        assert line["eval/length"] == own["eval/length"]
        assert line["eval/components/again/groups"] == num_prompts
        assert line["eval/components/again/sevens"] == pytest.approx(line["eval/reward"] * 4)  # of four samples
        assert not any("sevens/groups" in key for key in line)
    assert any(line["eval/reward"] > 0 for line in measured)
    assert same(weights(task, "asked"), weights(task, "plain"))


@pytest.mark.slow
def test_groups_that_a_component_drops_are_replaced_and_recorded(task):
    metrics = run(task, "dropping", components=f"{{sevens: {component(task, drops=[0, 3])}}}")
    assert sum(line["components/sevens/dropped"] for line in metrics[1:]) >= 2
    assert metrics[1]["samples"] == 16
    ledger = [json.loads(line) for line in (task / "runs" / "dropping" / "ledger.jsonl").read_text().splitlines()]
    assert {row["prompt"] for row in ledger if row["reason"] == "sevens: its number"} == {0, 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runtime", "ranks"),
    [
        ("runtime: local, inventory: 1x2", (None, None)),  # which are threads, without variables of their own
        pytest.param("runtime: ray", (0, 1), marks=[pytest.mark.ray, pytest.mark.long]),
    ],
    ids=("local", "ray"),
)
def test_every_process_of_a_component_gets_whole_groups_and_no_bit_changes(task, runtime, ranks):
    changes = {"reward": f"{{function: {task}/nothing.py}}", "components": f"{{sevens: {component(task)}}}"}
    run(task, "here", **changes)
    (task / "log").unlink()
    placement = "{actor: 0, rollout: 1, sevens: 0-1}"
    run(task, "in-two", cluster=f"{{{runtime}, component_placement: {placement}}}", **changes)
    assert same(weights(task, "in-two"), weights(task, "here"))
    notes = [line for line in (task / "log").read_text().splitlines() if " run " in line]
    num_steps = 2  # of four groups
    assert sorted(notes) == sorted(f"{rank} run 2" for rank in ranks for _ in range(num_steps))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "missing.py:Sevens"}, "components.sevens.path: there is no file missing.py"),
        ({"path": "{task}/sevens.py:Seven"}, "has no class Seven"),
        ({"path": "no.such.module:Sevens"}, "no.such.module cannot be imported"),
        ({"path": "json:dumps"}, "json:dumps is no class"),
        ({"path": "collections:OrderedDict"}, "OrderedDict has no method run(self, groups)"),
        ({"kwargs": "{file: x}"}, "does not take kwargs"),
        ({"path": "{task}/wrong.py:TwoArguments", "kwargs": "{}"}, "called with the groups alone"),
        ({"path": "{task}/wrong.py:OneWay", "kwargs": "{}"}, "has no onload: write both offload and onload"),
        ({"path": "{task}/wrong.py:Stays", "kwargs": "{}"}, "has no methods offload and onload, and the plan"),
    ],
)
def test_a_class_that_cannot_be_a_component_is_named_before_a_model_loads(task, changes, message, capsys):
    (task / "wrong.py").write_text(
        "class TwoArguments:\n    def run(self, groups, more): ...\n"
        "class OneWay:\n    def run(self, groups): ...\n    def offload(self): ...\n"
        "class Stays:\n    def run(self, groups): ...\n"
    )
    settings = {"path": f"{task}/sevens.py:Sevens", "kwargs": f"{{log: {task}/log}}", "enable_offload": "true"}
    settings |= {key: value.replace("{task}", str(task)) for key, value in changes.items()}
    text = ", ".join(f"{key}: {value}" for key, value in settings.items())
    file = task / "run.yaml"
    file.write_text(rl_yaml(task, components=f"{{sevens: {{{text}}}}}"))
    assert main(["run", str(file)]) != 0
    assert message in capsys.readouterr().err
    assert not (task / "runs" / "run" / "metrics.jsonl").exists()


def group_of(*rewards: float, turn_rewards: tuple[float, ...] = ()) -> PromptGroup:
    nothing = torch.zeros(0)
    segment = Segment(nothing, nothing, nothing, nothing)
    samples = [
        ScoredEpisode(Episode(SampleKey(0, 0, at), (segment,), "query"), reward, reward, {}, turn_rewards)
        for at, reward in enumerate(rewards)
    ]
    return PromptGroup(Prompt(5, "text", ()), tuple(samples))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([], "run returned 0 results for 1 groups"),
        (None, "run returned NoneType for 1 groups"),
        ([1], "prompt 5: run returned int: return hotseat.GroupChange"),
        ([GroupChange([1.0])], "prompt 5: 1 rewards for 2 samples"),
        ([GroupChange([1.0, math.nan])], "they must be finite numbers"),
        ([GroupChange(1.0)], "rewards are 1.0: return a list, one for each sample"),
        ([GroupChange(metrics={"x": "y"})], "metrics {'x': 'y'}: they must be finite numbers"),
        ([GroupChange(metrics=[1.0])], "metrics are [1.0]: return a mapping"),
        ([GroupChange(metrics={"dropped": 1.0})], "dropped is a metric of every component"),
        ([GroupChange(drop=True)], "drop is True: give the reason in words"),
    ],
)
def test_results_that_mean_nothing_are_named(changes, message, monkeypatch):
    monkeypatch.setattr(Answers, "changes", changes)
    worker = ComponentWorker(ComponentSettings("odd", f"{__name__}:Answers"))
    with pytest.raises(RunError) as raised:
        worker.change([Share((group_of(0.0, 1.0),), ((),))])
    assert str(raised.value).startswith(f"components.odd ({__name__}:Answers)")
    assert message in str(raised.value)


def test_decisions_become_plain_numbers(monkeypatch):
    change = GroupChange(torch.tensor([0.5, 2.0]).numpy(), metrics={"seen": torch.tensor(3.0).numpy()[()]})
    monkeypatch.setattr(Answers, "changes", [change])
    worker = ComponentWorker(ComponentSettings("odd", f"{__name__}:Answers"))
    assert worker.change([Share((group_of(0.0, 1.0),), ((),))]) == [GroupChange((0.5, 2.0), None, {"seen": 3.0})]


@pytest.mark.parametrize("what", ["its constructor", "run", "offload", "onload"])
def test_whatever_raises_in_a_component_is_named_with_its_line(tmp_path, what):
    file = tmp_path / "odd.py"
    lines = ["class Odd:", *(f"    def {name}(self, *_): ..." for name in ("__init__", "run", "offload", "onload"))]
    at = 1 + ["its constructor", "run", "offload", "onload"].index(what)
    lines[at] = lines[at].replace("...", "1 / 0")
    file.write_text("\n".join(lines))
    with pytest.raises(RunError, match=f"components.odd .*: {what} raised ZeroDivisionError.* at line {at + 1}"):  # noqa: PT012
        worker = ComponentWorker(ComponentSettings("odd", f"{file}:Odd"))
        worker.offload(())
        worker.onload(())
        worker.change([Share((group_of(0.0, 1.0),), ((),))])


def test_a_class_whose_constructor_is_not_python_can_be_a_component(tmp_path):
    (tmp_path / "own.py").write_text(
        "class Own(dict):\n    def run(self, groups):\n        return [None] * len(groups)\n"
    )
    assert component_problem("own", f"{tmp_path}/own.py:Own", {}, is_offloaded=False) is None


class Halves:
    """Stands for hosts and for the processes of a component, which takes half of every reward."""

    ranks, size = (0,), 1

    def __init__(self, rewards: dict[tuple[int, int], list[float]]):
        self.rewards = rewards
        self.num_calls = 0

    def shares(self, wanted):
        return [list(each.keys) for each in wanted]

    def change_rewards(self, rewards):
        self.rewards |= rewards

    def scatter(self, method, shares):
        self.num_calls += 1
        return [[GroupChange([reward / 2 for reward in self.rewards[key]]) for key in keys] for keys in shares]

    @contextlib.contextmanager
    def lease(self, phase, name):
        yield


def test_a_rollout_that_is_repeated_gets_the_decisions_that_were_made():
    keys = [(0, 1), (0, 2)]
    rewards = (4.0, 8.0)
    facts = [
        GroupFacts(0, prompt, "", (0, 1), rewards, rewards, (1, 1), (2, 2), (False, False), ()) for _, prompt in keys
    ]
    hosts = Halves({key: [4.0, 8.0] for key in keys})
    components = Components({"halves": hosts}, hosts, hosts)
    first = components.change(facts)
    assert [each.rewards for each in first] == [(2.0, 4.0)] * 2
    hosts.rewards[0, 2] = [4.0, 8.0]  # its host died and has sampled it again; the other has changed rewards
    assert components.change(facts) == first
    assert hosts.rewards == {key: [2.0, 4.0] for key in keys}
    assert hosts.num_calls == 1
    assert components.metrics()["components/halves/groups"] == 2
    components.change(facts)  # of the next step
    assert hosts.num_calls == 2


def test_evaluations_have_decisions_of_their_own_which_last_until_they_are_measured():
    rewards = (4.0, 8.0)
    trained, evaluated = (
        GroupFacts(epoch, 1, "", (0, 1), rewards, rewards, (1, 1), (2, 2), (False, False), ()) for epoch in (0, -1)
    )
    hosts = Halves({key: [4.0, 8.0] for key in [(0, 1), (-1, 1)]})
    components = Components({"first": hosts, "second": hosts}, hosts, hosts, evaluating=["second"])
    assert components.change([trained])[0].rewards == (1.0, 2.0)
    assert components.change([evaluated], is_evaluation=True)[0].rewards == (2.0, 4.0)
    # The rollout is repeated: its host has the changed rewards, and no component sees them again.
    assert components.change([evaluated], is_evaluation=True)[0].rewards == (2.0, 4.0)
    assert hosts.num_calls == 3
    assert components.metrics(is_evaluation=True) == {
        "eval/components/second/groups": 1.0,
        "eval/components/second/dropped": 0.0,
    }
    assert components.metrics()["components/second/groups"] == 1.0
    # The next evaluation has groups of the same keys, and other answers.
    hosts.rewards[-1, 1] = [6.0, 2.0]
    assert components.change([evaluated], is_evaluation=True)[0].rewards == (3.0, 1.0)


def test_rewards_of_turns_cannot_be_replaced(monkeypatch):
    monkeypatch.setattr(Answers, "changes", [GroupChange([1.0])])
    worker = ComponentWorker(ComponentSettings("odd", f"{__name__}:Answers"))
    with pytest.raises(RunError, match="rewards of single turns"):
        worker.change([Share((group_of(1.0, turn_rewards=(0.5, 0.5)),), ((),))])


class Answers:
    changes: list | None = None

    def run(self, groups):
        return self.changes


@pytest.mark.slow
def test_an_evaluation_of_which_nothing_is_left_ends_the_run(task, capsys):
    (task / "none.py").write_text(
        "from hotseat import GroupChange\n\n\nclass Drops:\n    def run(self, groups):\n"
        "        epochs = [group.samples[0].episode.key.epoch for group in groups]\n"
        "        return [GroupChange(drop='evaluated') if epoch < 0 else None for epoch in epochs]\n"
    )
    file = task / "run.yaml"
    components = f"{{drops: {{path: {task}/none.py:Drops, evaluates: true}}}}"
    file.write_text(rl_yaml(task, components=components, eval=f"{{path: {task}/prompts.jsonl}}"))
    assert main(["run", str(file)]) != 0
    assert "components dropped all" in capsys.readouterr().err


@pytest.mark.slow
def test_an_exception_of_a_component_ends_the_run_and_names_it(task, capsys):
    (task / "odd.py").write_text("class Odd:\n    def run(self, groups):\n        return groups.oops\n")
    file = task / "run.yaml"
    file.write_text(rl_yaml(task, components=f"{{odd: {{path: {task}/odd.py:Odd}}}}"))
    assert main(["run", str(file)]) != 0
    error = capsys.readouterr().err
    assert f"components.odd ({task}/odd.py:Odd): run raised AttributeError" in error
    assert "at line 3" in error


def test_a_plan_has_components_by_name_with_their_memory():
    text = (
        "actor: {model: Qwen2.5-1.5B}\n"
        "components: {filter: {path: 'a:B', memory_gib: 4}}\n"
        "cluster: {component_placement: {actor: 0-1, rollout: 0-1, filter: '1'}}\n"
    )
    plan = make_plan(loads(text), "1x2xA100-80G")
    assert [process.devices for process in plan.role("filter").processes] == [(1,)]
    [works] = [step for step in plan.steps if "filter" in step.roles]
    assert works.kind == "prepare"
    group = plan.group_of(1)
    [step] = [step for step in group.steps if step.step == works.name]
    assert {term.name: term.gib for term in step.terms if term.role == "filter"} == {
        "component": 4.0,
        "device context": 1.0,
    }


@pytest.mark.parametrize(
    ("flow", "message"),
    [
        ("[{name: a, run: [rollout]}, {name: b, run: [actor]}, {name: c, run: [filter]}]", "filter works before actor"),
        ("[{name: a, run: [rollout, filter]}, {name: b, run: [actor]}]", "filter has no work with the roles under run"),
        ("[{name: a, run: [rollout]}, {name: b, run: [actor]}]", "works in no phase"),
    ],
)
def test_a_flow_has_components_after_rewards_and_before_other_scores(flow, message):
    phases = flow[:-1] + ", {name: y, train: [actor]}, {name: z, push: [rollout]}]"
    config = loads(f"actor: {{model: x}}\ncomponents: {{filter: {{path: 'a:B'}}}}\nflow: {phases}\n")
    if "no phase" in message:
        with pytest.raises(PlacementError, match=message):
            make_plan(config, "1x1")
    else:
        assert message in flow_problem(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("components: {actor: {path: 'a:B'}}", "actor is the name of processes that every run may have"),
        ("components: {'a b': {path: 'a:B'}}", "begin with a letter"),
        ("components: {x: {path: 'a:B'}}\noverlap: {staleness: 1}", "set it to 0"),
        ("components: {x: {path: 'a:B'}}\ncluster: {component_names: {x: env}}", "component_names has x for env"),
        ("components: {x: {path: a.py}}", "components.x.path"),
        ("components: {x: {path: 'a:B', evaluates: true}}", "components.x.evaluates: true, but nothing is evaluated"),
        ("components: {x: {path: 'a:B', memory: 3}}", "memory_gib"),
    ],
)
def test_settings_of_components_that_make_no_sense_are_refused(text, message):
    with pytest.raises(ConfigError) as raised:
        loads(text)
    assert message in str(raised.value)


def test_the_example_drops_groups_without_variety_and_charges_copies():
    class Sample:
        def __init__(self, query, reward):
            self.episode, self.reward = type("Episode", (), {"query": query}), reward

    def group(*answers):
        return PromptGroup(None, tuple(Sample(answer, 1.0) for answer in answers))

    variety = load_component(f"{EXAMPLE}:Variety")(penalty=0.25)
    assert variety.run([group("a", "b", "a"), group("a", "a")]) == [
        GroupChange([1.0, 1.0, 0.75], None, {"copies": 1.0}),
        GroupChange([1.0, 0.75], "all answers are alike", {"copies": 1.0}),
    ]
