"""The run's own directory: which one a run gets, and which are refused."""

import errno
import json
import os
import shutil
import stat
from types import SimpleNamespace

import pytest

from hotseat.config import loads, to_saved
from hotseat.config.changes import changes_between
from hotseat.errors import UserError
from hotseat.files import write_whole
from hotseat.loop.opening import open_run
from hotseat.loop.state.checkpoints import CheckpointStore
from hotseat.loop.state.run_dir import kept_config, make_run_dir, named_run, record_changes, sole_owner, write_config
from hotseat.observe import JsonLines
from hotseat.observe.timeline import Timeline


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


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "checkpoints"])
def test_a_link_in_a_run_folder_is_named_and_not_followed(config, tmp_path, name):
    path = begin(config, 0)
    target = tmp_path / "precious"
    target.write_text("mine")
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to(target)
    with pytest.raises(UserError, match=f"{path / name} is a link to {target}: a run writes to no link in its folder"):
        make_run_dir(config)
    assert target.read_text() == "mine"


def test_a_link_that_appears_later_is_not_followed_either(tmp_path):
    target = tmp_path / "precious"
    target.write_text('{"step": 9}\n')
    for name in (".lock", "metrics.jsonl", "timeline.json"):
        (tmp_path / name).symlink_to(target)
    with pytest.raises(UserError, match=r"\.lock is a link"), sole_owner(tmp_path):
        pass
    with pytest.raises(UserError, match=r"metrics\.jsonl is a link"):
        JsonLines(tmp_path / "metrics.jsonl", last_step=3)
    with pytest.raises(UserError, match=r"timeline\.json is a link"):
        Timeline(tmp_path / "timeline.json")
    assert target.read_text() == '{"step": 9}\n'


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_disk_without_locks_is_named(tmp_path, number):
    def unsupported(file, how):
        raise OSError(number, os.strerror(number))

    with (
        pytest.raises(UserError, match=rf"{tmp_path} is on a disk without locks \(flock: {os.strerror(number)}\)"),
        sole_owner(tmp_path, unsupported),
    ):
        pass


def test_a_config_is_replaced_as_a_whole(tmp_path):
    """A failure in the middle, here text that UTF-8 cannot write, leaves the file before, and nothing else."""
    write_whole(tmp_path / "config.yaml", "seed: 1\n")
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "config.yaml", "seed: 2\n" * 100_000 + "\ud800")
    assert (tmp_path / "config.yaml").read_text() == "seed: 1\n"
    with (tmp_path / "config.yaml").open() as reader:
        write_config(tmp_path, loads("seed: 2"))
        assert reader.read() == "seed: 1\n"  # not rewritten in place
    assert kept_config(tmp_path).seed == 2
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


SECRETS = {
    "variables": "cluster: {node_groups: [{label: a, env_configs: [{env_vars: [{HF_TOKEN: s3cret}]}]}]}",
    "query": "reward: {url: 'http://127.0.0.1:5000/get_reward?key=s3cret'}",
}


@pytest.mark.parametrize("kind", SECRETS)
def test_a_config_with_secrets_is_for_this_user_alone_and_not_told_of(tmp_path, kind):
    config = loads(SECRETS[kind])
    write_config(tmp_path, config)
    assert kept_config(tmp_path) == config
    assert stat.S_IMODE((tmp_path / "config.yaml").stat().st_mode) == 0o600
    for change in changes_between(to_saved(loads("")), config):
        assert "s3cret" not in str(change)
        record_changes(tmp_path, 3, [change])
    assert "s3cret" not in (tmp_path / "changes.jsonl").read_text()


def resuming(tmp_path, checkpoints, **changes):
    text = f"run_dir: {tmp_path}/runs\ncheckpoint: {{path: {checkpoints}, every: 1, resume: true}}\n"
    return loads(text, [f"{key}={value}" for key, value in changes.items()])


def test_checkpoints_that_are_resumed_lead_to_the_folder_of_their_run(tmp_path):
    """As OpenRLHF's commands resume: they name the folder of checkpoints, and never a run."""
    first = resuming(tmp_path, tmp_path / "ckpt")
    run = make_run_dir(first)
    write_config(run, first)
    assert run == tmp_path / "runs" / "rl-1"
    assert make_run_dir(first) == tmp_path / "runs" / "rl-2"  # there is no checkpoint yet
    store = CheckpointStore(tmp_path / "ckpt")
    store.begin(1, 0)
    store.commit(1, {"run": str(run)})
    assert make_run_dir(first) == run
    assert named_run(resuming(tmp_path, tmp_path / "ckpt", run_dir="elsewhere")).name == "rl-1"
    shutil.copytree(tmp_path / "ckpt", tmp_path / "copy")
    assert make_run_dir(resuming(tmp_path, tmp_path / "copy")) == tmp_path / "runs" / "rl-3"
