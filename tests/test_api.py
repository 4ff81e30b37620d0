"""`import hotseat`: light, and a run from Python is the run of the command."""

import ast
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import DOCUMENTS

import hotseat
from hotseat import ConfigError, Run, UserError, demo, numeric, rlinf
from hotseat.api import checked_config
from hotseat.config import load
from hotseat.envs import families, simulator
from hotseat.loop.state.run_dir import named_run
from hotseat.observe import JsonLines
from hotseat.script.objects import ScriptObjects

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "python.md"
TEXTS = [ROOT / "README.md", *DOCUMENTS, *sorted((ROOT / "examples").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))

# A name that is added or removed is a decision: change docs/python.md with it.
PUBLIC = [
    *("Advantages", "Agent", "AgentError", "Callback", "Completion", "Config", "ConfigError", "EarlyStopping"),
    *("Environment", "Episode", "GroupChange", "HotseatError", "LiveRun", "PolicyLoss", "Prompt", "PromptGroup"),
    *("Run", "RunError", "SampleFunction", "SampleKey", "Sampling"),
    *(
        "Sandbox",
        "SandboxSettings",
        "ScoredEpisode",
        "Segment",
        "SingleTurn",
        "Step",
        "StopAt",
        "TokenLayout",
        "Transcript",
        "UserError",
    ),
    *("__version__", "demo", "from_trl", "run", "start"),
]


def snippets(page: Path) -> list[str]:
    return re.findall(r"```python[^\n]*\n(.*?)```", page.read_text(), re.DOTALL)


def private_names(code: str) -> list[str]:
    """Names of the package that a piece of code imports or uses, and that are not public."""
    tree, found = ast.parse(code), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("hotseat.")]
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hotseat":
            modules = {
                "hotseat.demo": demo,
                "hotseat.envs.families": families,
                "hotseat.envs.simulator": simulator,
                "hotseat.numeric": numeric,
                "hotseat.rlinf": rlinf,
            }
            public = PUBLIC if node.module == "hotseat" else getattr(modules.get(node.module), "__all__", [])
            found += [f"{node.module}.{alias.name}" for alias in node.names if alias.name not in public]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hotseat":
            found += [f"hotseat.{node.attr}"] if node.attr not in PUBLIC else []
    return found


@pytest.mark.parametrize("file", [*EXAMPLES, *TEXTS], ids=lambda file: str(file.relative_to(ROOT)))
def test_examples_and_pages_use_only_public_names(file):
    codes = [file.read_text()] if file.suffix == ".py" else snippets(file)
    assert not [name for code in codes for name in private_names(code)]


def test_the_check_sees_private_names():
    assert private_names("import hotseat.loop\nfrom hotseat.train import Trainer\nfrom hotseat import Step, Nope") == [
        *("hotseat.loop", "hotseat.train.Trainer", "hotseat.Nope"),
    ]
    assert private_names("import hotseat\nhotseat.run('rl.yaml')\nhotseat.api.run('rl.yaml')") == ["hotseat.api"]


def test_the_page_names_every_public_name_and_no_other():
    head = PAGE.read_text().split("## ")[0]
    assert set(re.findall(r"`(\w+)`", head)) - {"hotseat"} == set(PUBLIC)


@pytest.mark.long
@pytest.mark.slow
def test_the_snippets_of_the_page_run(task, monkeypatch, capsys):
    from loop_cases import rl_yaml

    monkeypatch.chdir(task)
    Path("rl.yaml").write_text(rl_yaml(task, name="", run_dir="runs", eval="{path: prompts.jsonl}"))
    names: dict = {}
    for code in snippets(PAGE):
        exec(compile(code, str(PAGE), "exec"), names)
    told = capsys.readouterr().out
    assert "runs/rl-1 runs/rl-1/model" in told
    assert [run.metrics()[-1]["step"] for run in map(Run, ("runs/rl-2", "runs/rl-3"))] == [3, 2]
    assert Run("runs/rl-4").metrics()[-1]["mine/halved"] in (0.0, 1.0)
    assert "rolout: unknown key; did you mean rollout?" in told
    assert names["steps"] == [1, 2, 3, 4]  # 8 prompts, 4 in a step, 2 passes
    assert Run("runs/rl-1").samples()
    numbers = names["mean_centred"](names["layout"], names["torch"].tensor([1.0, 0.0])).advantages
    assert numbers.tolist() == [0, 0.5, 0.5, 0, -0.5]

    [agent] = [code for code in snippets(PAGE) if "class Twice" in code]
    Path("twice.py").write_text(agent)
    run = hotseat.run("rl.yaml", "agent.path=twice.py")
    assert run.path == Path("runs/rl-5")
    [segment] = run.samples()[0]["segments"]
    assert "".join("x" if sampled else "." for sampled in segment["sampled"]).strip(".").count("....") == 1


def test_import_is_light():
    code = "import sys, hotseat; hotseat.run, hotseat.Run; print(sorted({'torch', 'ray', 'transformers', 'pydantic',"
    code += " 'rich', 'yaml', 'numpy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.stdout.strip() == "[]", result.stderr


def test_the_public_names_are_these_and_documented():
    assert hotseat.__all__ == PUBLIC
    values = {name: getattr(hotseat, name) for name in PUBLIC if name != "__version__"}
    documented = {name for name, value in values.items() if value.__doc__ and not value.__doc__.startswith(f"{name}(")}
    assert documented == set(values)  # the text that a dataclass makes by itself does not count
    assert not [name for name, value in vars(Run).items() if not name.startswith("_") and not value.__doc__]
    assert not [name for name in demo.__all__ if not getattr(demo, name).__doc__]
    assert set(PUBLIC) <= set(dir(hotseat))


def test_a_name_that_is_not_public_is_no_attribute_of_the_package():
    code = "import hotseat; hotseat.Trainer"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.stderr.strip().endswith("AttributeError: module 'hotseat' has no attribute 'Trainer'")


def test_type_checkers_see_the_names_that_are_imported_at_their_first_use():
    tree = ast.parse((ROOT / "hotseat" / "__init__.py").read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name)]
    seen = {(node.module, alias.name) for node in block.body for alias in node.names}
    homes = {(home, name) for name, home in hotseat._HOME_OF.items()} | {("hotseat", "demo")}
    assert seen == homes
    assert {name for _, name in homes} | {"__version__"} == set(PUBLIC)


def test_agents_of_earlier_versions_import_the_same_classes():
    from hotseat.agents import Environment, Step

    assert (Environment, Step) == (hotseat.Environment, hotseat.Step)


def test_a_run_is_read_from_its_directory(tmp_path):
    records = [{"step": 0, "eval/accuracy": 0.5}, {"step": 1, "reward": 0.25}, {"step": 2, "eval/accuracy": 0.75}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in [*records, {"step": 3}]))
    (tmp_path / "config.yaml").write_text("task: rl\n")
    run = Run(tmp_path)
    assert run == Run(str(tmp_path))
    assert run.metrics()[:3] == records
    assert run.evaluation == {"eval/accuracy": 0.75}
    assert run.curve("eval/accuracy") == ([0, 2], [0.5, 0.75])
    assert (run.config.task, run.model) == ("rl", tmp_path / "model")
    (tmp_path / "config.yaml").write_text("task: rl\ncheckpoint: {export_path: out/sft}\n")
    assert str(run.model) == "out/sft"
    (tmp_path / "metrics.jsonl").write_text("")
    assert run.evaluation == {}


def test_samples_and_ledger_are_read_and_absent_ones_are_empty(tmp_path):
    (tmp_path / "config.yaml").write_text("task: sft\n")
    run = Run(tmp_path)
    assert (run.metrics(), run.samples(), run.ledger()) == ([], [], [])
    entry = {"epoch": 0, "prompt": 4, "samples": [0, 2], "state": "dropped", "step": 1, "version": 0, "reason": "x"}
    (tmp_path / "ledger.jsonl").write_text(json.dumps(entry) + "\n" + '{"epoch": 0, "pro')  # the last line is cut
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    assert run.ledger() == [entry]
    assert run.samples() == [{"step": 1, "reward": 0.5}]


def test_metrics_that_are_not_finite_are_floats_again(tmp_path):
    (tmp_path / "config.yaml").write_text("task: rl\n")
    with JsonLines(tmp_path / "metrics.jsonl") as file:
        file.write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "kl": -math.inf, "value": None})
    [record] = Run(tmp_path).metrics()
    assert math.isnan(record["loss"])
    assert (record["grad_norm"], record["kl"]) == (math.inf, -math.inf)
    assert Run(tmp_path).curve("grad_norm") == ([1], [math.inf])
    with pytest.raises(UserError, match="has no metric 'value'"):  # it was never measured
        Run(tmp_path).curve("value")


def test_what_is_no_run_or_no_metric_is_named(tmp_path):
    with pytest.raises(UserError, match="none holds no run: it has no config.yaml"):
        Run(tmp_path / "none").metrics()
    (tmp_path / "config.yaml").write_text("task: rl\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5, "reward_std": 0.1, "loss": 1.0}\n')
    with pytest.raises(UserError, match="has no metric 'rewards'; near it are: reward, reward_std"):
        Run(tmp_path).curve("rewards")


def test_a_run_without_a_name_gets_the_next_number(tmp_path):
    (tmp_path / "file.yaml").write_text("task: sft\n")
    config = load(tmp_path / "file.yaml", [f"run_dir={tmp_path}"])
    assert named_run(config).name == "sft-1"
    (tmp_path / "sft-1").mkdir()
    assert named_run(config).name == "sft-2"
    assert named_run(config.model_copy(update={"name": "mine"})).name == "mine"


def test_what_cannot_run_is_refused_as_on_the_command_line(tmp_path):
    with pytest.raises(ConfigError, match="rolout: unknown key; did you mean rollout"):
        hotseat.run({"rolout": {}})
    with pytest.raises(ConfigError, match="cannot be read"):
        hotseat.run(tmp_path / "none.yaml")
    with pytest.raises(UserError, match=r"actor\.model: not set"):
        hotseat.run({"task": "sft"}, f"run_dir={tmp_path}")
    for text in ("task: sft\n", "task: sft", "task: rl", "{task: rl}"):  # YAML, not the path of a file
        with pytest.raises(UserError, match=r"actor\.model: not set"):
            hotseat.run(text, f"run_dir={tmp_path}")


def test_options_of_the_config_have_an_effect_with_what_keywords_stand_for():
    """Each of them is refused where it has none."""
    options = {"data": {"label_key": "a"}, "eval": {"every": 3}, "reward": {"timeout_s": 7}}
    options["agent"] = {"tool_timeout_s": 5}
    rows = [{"input": "a"}]
    keywords = {"train": rows, "eval": rows, "reward": lambda queries, prompts, labels: [0.0], "agent": "agent.py"}
    found = checked_config(options, (), keywords, ScriptObjects())
    assert (found.eval.every, found.reward.timeout_s, found.agent.tool_timeout_s) == (3, 7, 5)
    for name, key in (("eval", "eval.every"), ("reward", "reward.timeout_s"), ("agent", "agent.tool_timeout_s")):
        with pytest.raises(ConfigError, match=f"{key}: has no effect"):
            checked_config(options, (), {**keywords, name: None}, ScriptObjects())


def test_a_problem_of_a_file_names_its_line(tmp_path):
    (tmp_path / "rl.yaml").write_text("actor: {model: m}\neval:\n  every: 3\n")
    with pytest.raises(ConfigError, match=r"rl\.yaml:3: eval\.every: has no effect"):
        checked_config(tmp_path / "rl.yaml", (), {}, ScriptObjects())
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read"):
        checked_config(tmp_path / "none.yaml", (), {}, ScriptObjects())


@pytest.mark.slow
def test_a_mapping_a_file_and_a_config_are_the_same_run(tmp_path):
    files = demo.make_files(tmp_path, 0, num_layers=1, width=32)
    plain = {
        "task": "sft",
        "run_dir": str(tmp_path / "runs"),
        "cluster": {"runtime": "local"},
        "actor": {"model": str(files.model), "optimizer": {"learning_rate": 1e-3}},
        "data": {"path": str(files.examples), "output_key": "output", "max_length": 16, "max_samples": 64},
        "train": {"dtype": "fp32", "batch_size": 32},
    }
    first = hotseat.run(plain)
    (tmp_path / "sft.yaml").write_text(json.dumps(plain))
    second = hotseat.run(tmp_path / "sft.yaml", "name=second")
    third = hotseat.run(load(tmp_path / "sft.yaml"), "train.batch_size=16")
    assert [run.path.name for run in (first, second, third)] == ["sft-1", "second", "sft-2"]
    assert [record["loss"] for record in first.metrics()] == [record["loss"] for record in second.metrics()]
    assert (len(first.metrics()), len(third.metrics())) == (2, 4)
    assert (first.model / "model.safetensors").is_file()
