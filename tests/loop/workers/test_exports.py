"""Exported models: complete or absent, marked with their run and step, and exported again if that failed."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from loop_cases import make_task, rl_yaml, same, sft_yaml, weights
from safetensors.torch import load_file

from hotseat.cli.main import main
from hotseat.config import loads
from hotseat.errors import RunError, UserError
from hotseat.loop.opening import OpenRun, export_models
from hotseat.loop.run import start
from hotseat.loop.state.checkpoints import CheckpointStore
from hotseat.loop.workers.exports import Origin, begin_export, finish_export, is_exported

HAS_MOUNTS = bool(shutil.which("unshare")) and not subprocess.run(["unshare", "-rm", "true"]).returncode
FIRST, SECOND = Origin("rl-1", 10, "aa"), Origin("rl-1", 20, "bb")


def export(folder: Path, origin: Origin, **files: str) -> None:
    writing = begin_export(folder)
    for name, text in files.items():
        (writing / name.replace("_", ".")).write_text(text)
    finish_export(writing, folder, {"tokenizer.json": b"{}"}, origin)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_model_appears_with_its_tokenizer_and_the_run_and_step_it_is_of(tmp_path):
    folder = tmp_path / "new" / "model"
    writing = begin_export(folder)
    (writing / "config.json").write_text("{}")
    (writing / "model.safetensors").write_text("weights")
    assert not folder.exists()
    finish_export(writing, folder, {"tokenizer.json": b"{}"}, FIRST)
    assert names(folder) == {"config.json", "model.safetensors", "tokenizer.json", "hotseat.json"}
    assert names(folder.parent) == {"model"}
    assert json.loads((folder / "hotseat.json").read_text()) == {
        "run": "rl-1",
        "step": 10,
        "checkpoint": "aa",
        "files": {"config.json": 2, "model.safetensors": 7, "tokenizer.json": 2},
    }
    assert is_exported(folder, FIRST)


def test_the_model_before_stays_until_the_new_one_is_written_and_nothing_else_is_touched(tmp_path):
    """As with OpenRLHF's defaults, where the folder of checkpoints is inside the one of the model."""
    export(tmp_path, FIRST, config_json="{}", **{"model-1_safetensors": "old", "model-2_safetensors": "old"})
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "shard").write_text("of another run")
    writing = begin_export(tmp_path)
    (writing / "config.json").write_text("{}")
    (writing / "model.safetensors").write_text("new")
    assert is_exported(tmp_path, FIRST)
    finish_export(writing, tmp_path, {}, SECOND)
    assert names(tmp_path) == {"checkpoints", "config.json", "model.safetensors", "hotseat.json"}
    assert (tmp_path / "checkpoints" / "shard").read_text() == "of another run"
    assert (tmp_path / "model.safetensors").read_text() == "new"
    assert is_exported(tmp_path, SECOND)
    assert not is_exported(tmp_path, FIRST)


def test_weights_of_a_model_without_a_marker_are_replaced(tmp_path):
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "notes.txt"):
        (tmp_path / name).write_text("old")
    export(tmp_path, FIRST, config_json="{}", model_safetensors="new")
    assert names(tmp_path) == {"config.json", "model.safetensors", "tokenizer.json", "hotseat.json", "notes.txt"}


def test_names_in_a_marker_cannot_lead_out_of_the_folder(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "hotseat.json").write_text('{"files": {"../precious": 4}}')
    export(tmp_path / "model", FIRST, config_json="{}")
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize(
    "other", [Origin("rl-2", 10, "aa"), Origin("rl-1", 9, "aa"), Origin("rl-1", 10, "cc"), Origin("rl-1", 10, None)]
)
def test_an_export_of_another_run_step_or_checkpoint_is_not_this_one(tmp_path, other):
    export(tmp_path, other, config_json="{}", model_safetensors="weights")
    assert is_exported(tmp_path, other)
    assert not is_exported(tmp_path, FIRST)


def test_an_export_that_lost_a_file_is_none(tmp_path):
    export(tmp_path, FIRST, config_json="{}", model_safetensors="weights")
    (tmp_path / "config.json").write_text('{"edited": true}')
    assert is_exported(tmp_path, FIRST)
    (tmp_path / "model.safetensors").write_text("weig")
    assert not is_exported(tmp_path, FIRST)
    (tmp_path / "model.safetensors").write_text("weights")
    (tmp_path / "tokenizer.json").unlink()
    assert not is_exported(tmp_path, FIRST)


class Ranks:
    """A first rank on another node, which sees `there` under the name of every folder below `here`."""

    def __init__(self, here: Path, there: Path, error: Exception | None = None):
        self._here, self._there, self._error = str(here), str(there), error

    def on(self, rank: int) -> "Ranks":
        assert rank == 0
        return self

    def call(self, method, *args):
        there = [arg.replace(self._here, self._there) if isinstance(arg, str) else arg for arg in args]
        result = method(None, *there)
        return [result.replace(self._there, self._here) if result is not None else None]

    def write(self, what: str, folder: str) -> None:
        place = Path(folder.replace(self._here, self._there))
        (place / "config.json").write_text("{}")
        if self._error is not None:
            raise self._error
        (place / "model.safetensors").write_text("weights")


def finished_run(run_dir: Path, said: list[str], *overrides: str) -> SimpleNamespace:
    return SimpleNamespace(
        config=loads("", overrides),
        run_dir=run_dir,
        checkpoint=None,
        journal=SimpleNamespace(phase=lambda name: None, say=said.append),
        saver=SimpleNamespace(digest=lambda step: None, finish=lambda say: say("concluded")),
    )


class Tokenizer:
    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")


def export_by(run: OpenRun, ranks: Ranks, tokenizer) -> None:
    export_models(run, {"model": ranks, "moving average": ranks}, ranks.write, tokenizer, 3)


def test_model_average_and_tokenizer_are_together_where_the_first_rank_is(tmp_path):
    here, there, said = tmp_path / "here", tmp_path / "there", []
    run = finished_run(here / "run", said, "train.ema.enabled=true", "train.ema.beta=0.9")
    export_by(run, Ranks(here, there), Tokenizer())
    for name in ("model", "model_ema"):
        assert names(there / "run" / name) == {"config.json", "model.safetensors", "tokenizer.json", "hotseat.json"}
    assert not here.exists()
    assert f"model: {here}/run/model on the node of the first rank" in said
    assert said[-1] == "concluded"


def test_an_export_that_fails_leaves_nothing_and_says_that_resuming_exports(tmp_path):
    run = finished_run(tmp_path / "run", [])
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    failed = r"model could not be exported to .*/run/model: .*No space left .*"
    with pytest.raises(RunError, match=f"{failed} no checkpoint of the last step"):
        export_by(run, Ranks(tmp_path, tmp_path, full), Tokenizer())
    run.saver.digest = lambda step: "aa"
    with pytest.raises(RunError, match=f"{failed} resumed run exports it"):
        export_by(run, Ranks(tmp_path, tmp_path, full), Tokenizer())
    assert not list((tmp_path / "run").iterdir())


def test_weights_that_are_nowhere_else_stay_though_the_export_fails(tmp_path):
    class Broken:
        def save_pretrained(self, folder: str) -> None:
            raise OSError("no room for the tokenizer")

    run = finished_run(tmp_path / "run", [])
    with pytest.raises(RunError, match=r"no room for the tokenizer; its weights are in .*/run/\.model\.exporting"):
        export_by(run, Ranks(tmp_path, tmp_path), Broken())
    assert (tmp_path / "run" / ".model.exporting" / "model.safetensors").read_text() == "weights"
    run.saver.digest = lambda step: "aa"
    with pytest.raises(RunError, match="no room for the tokenizer; .* a resumed run exports it"):
        export_by(run, Ranks(tmp_path, tmp_path), Broken())
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.slow
def test_a_last_checkpoint_that_nobody_asked_for_costs_no_model(tmp_path, capsys):
    """A metric that nothing measures is found when the first checkpoint with an evaluation is made."""
    task = make_task(tmp_path)
    text = rl_yaml(task, name="run", eval=f"{{path: {task}/prompts.jsonl}}")
    start(loads(text, ["checkpoint.best_metric=accurcy"]))
    assert "no checkpoint of the last step is made, and the model is exported: " in capsys.readouterr().out
    assert is_exported(task / "runs" / "run" / "model", Origin("run", 2, None))


@pytest.mark.slow
def test_a_finished_run_without_checkpoints_is_not_trained_again_over_its_export(tmp_path):
    task = make_task(tmp_path)
    keys = ["checkpoint.keep_final=false", f"checkpoint.export_path={task}/out", "checkpoint.resume=true"]
    start(loads(sft_yaml(task), keys))
    with pytest.raises(UserError, match="was finished without checkpoints"):
        start(loads(sft_yaml(task), keys))


@pytest.mark.slow
def test_a_run_whose_model_is_not_whole_exports_it_again_whatever_the_times_of_files(tmp_path, capsys):
    task = make_task(tmp_path)
    start(loads(sft_yaml(task)))
    model = task / "runs" / "sft" / "model"
    whole = (model / "model.safetensors").read_bytes()
    os.utime(model / "config.json", (0, 0))
    assert main(["resume", str(task / "runs" / "sft")]) == 0
    assert "nothing to do: all 8 steps are done" in capsys.readouterr().out
    (model / "model.safetensors").unlink()  # as after a full disk, with everything else newer than the checkpoint
    os.utime(model / "config.json")
    assert main(["resume", str(task / "runs" / "sft")]) == 0
    assert f"model: {model}" in capsys.readouterr().out
    assert (model / "model.safetensors").read_bytes() == whole


@pytest.mark.long
@pytest.mark.slow
def test_a_finished_run_is_extended_from_its_last_checkpoint(tmp_path, capsys):
    """The example of `hotseat resume --help`."""
    task = make_task(tmp_path)
    start(loads(rl_yaml(task, name="whole"), ["train.num_episodes=2", "checkpoint.keep_final=false"]))
    assert not (task / "runs" / "whole" / "checkpoints").exists()
    start(loads(rl_yaml(task, name="run")))
    kept = task / "runs" / "run" / "checkpoints"
    assert f"checkpoint: {kept}/step-000002, 0." in capsys.readouterr().out
    assert main(["resume", str(task / "runs" / "run"), "train.num_episodes=2"]) == 0
    assert same(weights(task, "whole"), weights(task, "run"))
    assert CheckpointStore(kept).steps() == [2, 4]
    marker = json.loads((task / "runs" / "run" / "model" / "hotseat.json").read_text())
    assert (marker["run"], marker["step"]) == ("run", 4)
    assert main(["resume", str(task / "runs" / "run"), "checkpoint.keep_final=false"]) == 0
    assert "nothing to do" in (said := capsys.readouterr().out)
    assert "checkpoints deleted (checkpoint.keep_final is false): 2, 4" in said
    assert CheckpointStore(kept).steps() == []


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not HAS_MOUNTS, reason="needs `unshare -rm`")
def test_a_disk_that_is_full_at_the_export_costs_no_model(tmp_path):
    task = make_task(tmp_path)
    disk = tmp_path / "disk"
    disk.mkdir()
    (task / "run.yaml").write_text(sft_yaml(task))
    hotseat = f"{sys.executable} -m hotseat.cli.main"
    script = f"""
        mount -t tmpfs -o size=12k none {disk}
        {hotseat} run {task}/run.yaml checkpoint.export_path={disk}/model
        echo "ended with $?, has $(cd {disk}; ls -A)"
        mount -o remount,size=64m {disk}
        {hotseat} resume {task}/runs/sft
        echo "ended with $?, has $(cd {disk}; ls -A)"
        cp -r {disk}/model {task}/copy
    """
    done = subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, timeout=600)
    assert f"hotseat: the model could not be exported to {disk}/model: " in done.stderr
    assert f"resume after step 8: hotseat resume {task}/runs/sft" in done.stderr
    assert "ended with 1, has \n" in done.stdout
    assert done.stdout.endswith("ended with 0, has model\n"), done.stderr[-3000:]
    start(loads(sft_yaml(task, name="whole")))
    assert same(load_file(task / "copy" / "model.safetensors"), weights(task, "whole"))
