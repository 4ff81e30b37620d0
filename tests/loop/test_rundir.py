"""The run's own directory: which one a run gets, and which are refused."""

import json
from types import SimpleNamespace

import pytest

from hotseat.config import loads
from hotseat.errors import UserError
from hotseat.loop.opening import open_run
from hotseat.loop.state.run_dir import make_run_dir, write_config


@pytest.fixture
def config(tmp_path):
    return loads(f"{{name: mine, run_dir: {tmp_path}}}")


def begin(config, *steps):
    path = make_run_dir(config)
    write_config(path, config)
    (path / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in steps))
    return path


@pytest.mark.parametrize("steps", [(), (0,)], ids=["nothing", "evaluated"])
def test_a_run_that_made_no_step_is_started_over_under_its_name(config, steps):
    assert begin(config, *steps) == make_run_dir(config)


def test_a_run_that_made_a_step_keeps_its_name(config):
    path = begin(config, 0, 1)
    with pytest.raises(UserError, match=f"{path} holds a run already: choose another name"):
        make_run_dir(config)


def test_resuming_is_advised_where_there_is_a_checkpoint(config):
    path = begin(config, 0, 1)
    (path / "checkpoints" / "step-000001").mkdir(parents=True)
    with pytest.raises(UserError, match=f"resume it \\(`hotseat resume {path}`\\), choose another name"):
        make_run_dir(config)


def test_a_folder_with_something_else_in_it_is_not_taken(config, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(UserError, match="holds a run already"):
        make_run_dir(config)


def refused(config) -> str:
    inputs = SimpleNamespace(tokenizer=None, notes=[], rows=[], algebra=SimpleNamespace(num_steps=1))
    with pytest.raises(UserError) as caught, open_run(config, inputs, {}, view=None):
        pass
    return str(caught.value)


def test_a_run_that_is_refused_leaves_no_empty_folders(tmp_path):
    others = tmp_path / "others"
    (others / "step-000001").mkdir(parents=True)
    given = loads(f"actor: {{model: m}}\nrun_dir: {tmp_path}/runs\ncheckpoint: {{path: {others}, every: 1}}\n")
    assert "holds checkpoints of another run" in refused(given)
    assert [path.name for path in tmp_path.iterdir()] == ["others"]
    assert {path.name for path in others.iterdir()} <= {"step-000001", ".lock"}


def test_a_resume_that_is_refused_leaves_no_empty_folder_of_checkpoints(tmp_path):
    run_dir = tmp_path / "done"
    (run_dir / "model").mkdir(parents=True)
    given = loads(f"actor: {{model: m}}\nname: done\nrun_dir: {tmp_path}\ncheckpoint: {{resume: true}}\n")
    assert "was finished without checkpoints" in refused(given)
    assert not (run_dir / "checkpoints").exists()
    assert (run_dir / "model").is_dir()
