"""`import hotseat`: light, and a run from Python is the run of the command."""

import json
import subprocess
import sys

import pytest

import hotseat
from hotseat.config import load
from hotseat.errors import ConfigError, UserError
from hotseat.loop.setup.demo import make_files
from hotseat.loop.state.run_dir import named_run


def test_import_is_light():
    code = "import sys, hotseat; hotseat.run, hotseat.Run; print(sorted({'torch', 'ray', 'transformers', 'pydantic',"
    code += " 'rich', 'yaml', 'numpy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.stdout.strip() == "[]", result.stderr


def test_public_names_are_documented():
    assert set(hotseat.__all__) == {"Run", "__version__", "run"}
    assert "hotseat.run(" in hotseat.__doc__
    assert all(part.__doc__ for part in (hotseat.run, hotseat.Run, hotseat.Run.metrics, hotseat.Run.evaluation))


def test_a_run_is_read_from_its_directory(tmp_path):
    records = [{"step": 0, "eval/accuracy": 0.5}, {"step": 1, "reward": 0.25}, {"step": 2, "eval/accuracy": 0.75}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in [*records, {"step": 3}]))
    (tmp_path / "config.yaml").write_text("task: rl\n")
    run = hotseat.Run(tmp_path)
    assert run.metrics()[:3] == records
    assert run.evaluation == {"eval/accuracy": 0.75}
    assert (run.config.task, run.model) == ("rl", tmp_path / "model")
    (tmp_path / "config.yaml").write_text("task: rl\ncheckpoint: {export_path: out/sft}\n")
    assert str(run.model) == "out/sft"
    (tmp_path / "metrics.jsonl").write_text("")
    assert run.evaluation == {}


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


@pytest.mark.slow
def test_a_mapping_a_file_and_a_config_are_the_same_run(tmp_path):
    files = make_files(tmp_path, 0, num_layers=1, width=32)
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
