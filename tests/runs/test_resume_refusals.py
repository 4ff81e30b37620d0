"""What a run goes on from is whole and is its own; everything else is refused, by name."""

import hashlib
import json
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from environments import own_environment
from loop_cases import make_task, rl_yaml
from pickles import Bomb
from safetensors.torch import load_file
from stopped_runs import stopped_after_saving

from hotseat.cli.main import main
from hotseat.config import loads
from hotseat.loop.rl.ledger import read_ledger
from hotseat.loop.run import start
from hotseat.observe import read_lines

pytestmark = pytest.mark.slow


def weights(run: Path) -> dict:
    return load_file(run / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    """A task with two runs of four steps: `whole`, and `broken`, which died after the checkpoint of step 2."""
    task = make_task(tmp_path_factory.mktemp("task"))
    options = ["train.num_episodes=2", "checkpoint.every=1"]
    start(loads(rl_yaml(task, name="whole"), options))
    with stopped_after_saving(2):
        start(loads(rl_yaml(task, name="broken"), options))
    return task


@pytest.fixture
def broken(task, tmp_path) -> Path:
    """A copy of the run that died."""
    return Path(shutil.copytree(task / "runs" / "broken", tmp_path / "runs" / "copy"))


def files(checkpoint: Path) -> list[str]:
    return sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file())


def refused(run: Path, capsys, *overrides: str, code: int = 1) -> str:
    """The message with which going on is refused. Nothing was trained, and no step was taken back."""
    before = (run / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert main(["resume", str(run), *overrides]) == code
    assert (run / "metrics.jsonl").read_bytes() == before
    assert not (run / "model").exists()
    return capsys.readouterr().err


@pytest.mark.long
def test_one_flipped_bit_in_any_file_is_found(broken, capsys):
    """Scenario 20: weights, optimizer (in the shards, with their index) and state."""
    newest, chosen = broken / "checkpoints" / "step-000002", random.Random(0)
    names = files(newest)
    assert any(name.endswith(".distcp") for name in names)
    assert {"state.json", "ledger.jsonl", "manifest.json"} <= set(names)
    for name in names:
        for _ in range(2):
            data = (newest / name).read_bytes()
            at = chosen.randrange(len(data))
            (newest / name).write_bytes(data[:at] + bytes([data[at] ^ 1 << chosen.randrange(8)]) + data[at + 1 :])
            message = refused(broken, capsys)
            assert "step-000002 is damaged" in message
            assert name in message or name == "manifest.json"
            assert "remove it to resume from step-000001" in message
            (newest / name).write_bytes(data)
    assert main(["resume", str(broken)]) == 0


@pytest.mark.parametrize(
    "damage", ["cut short", *(pytest.param(damage, marks=pytest.mark.long) for damage in ("emptied", "removed"))]
)
def test_what_is_cut_short_or_missing_is_named_and_no_run_starts_anew(broken, capsys, damage):
    """Scenario 21: with the only checkpoint, so that nothing is left to fall back to."""
    shutil.rmtree(broken / "checkpoints" / "step-000001")
    only = broken / "checkpoints" / "step-000002"
    for name in files(only):
        data = (only / name).read_bytes()
        if damage == "removed":
            (only / name).unlink()
        else:
            (only / name).write_bytes(data[: len(data) // 2 if damage == "cut short" else 0])
        message = refused(broken, capsys)
        assert f"step-000002 is damaged: {name}" in message
        assert "remove it" not in message
        (only / name).write_bytes(data)
    assert main(["resume", str(broken)]) == 0


def test_a_checkpoint_that_was_forged_as_a_whole_runs_no_code(broken, capsys, tmp_path):
    """Scenario 63: a pickle in place of any file, or beside it, with a manifest that fits."""
    newest, traces = broken / "checkpoints" / "step-000002", tmp_path / "went off"
    pickled = pickle.dumps(Bomb(traces), protocol=2)
    names = [name for name in files(newest) if name.startswith("actor/")]
    assert names == ["actor/__0_0.distcp", "actor/backend.json", "actor/metadata.json", "actor/rank-0.json"]
    for name in names[:3]:  # the last is read when a checkpoint is committed, and by no resumed run
        data = (newest / name).read_bytes()
        (newest / name).write_bytes(pickled)
        sign(newest)
        message = refused(broken, capsys)
        assert "does not fit this model" in message or f"{Path(name).name} " in message
        (newest / name).write_bytes(data)
    for name in ("actor/.metadata", "actor/__0.metadata"):  # where torch has them
        (newest / name).write_bytes(pickled)
    sign(newest)
    assert main(["resume", str(broken)]) == 0
    assert not traces.exists()
    pickle.loads(pickled)
    assert traces.exists()


def sign(checkpoint: Path) -> None:
    """Write the manifest of the files that are there."""
    facts = {
        name: {
            "bytes": (checkpoint / name).stat().st_size,
            "hash": hashlib.blake2b((checkpoint / name).read_bytes(), digest_size=16).hexdigest(),
        }
        for name in files(checkpoint)
        if name != "manifest.json"
    }
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps(manifest | {"files": facts}))


@pytest.mark.long
def test_going_on_twice_from_one_checkpoint_is_the_same_twice(task, tmp_path):
    """Scenario 23."""
    ends = []
    for name in ("once", "twice"):
        run = Path(shutil.copytree(task / "runs" / "broken", tmp_path / "runs" / name))
        assert main(["resume", str(run)]) == 0
        ends.append(
            (
                weights(run),
                list(read_ledger(run)),
                [record["loss"] for record in read_lines(run / "metrics.jsonl")[1:]],
            )
        )
    assert ends[0][1:] == ends[1][1:]
    for found, _, _ in ends:
        assert all((found[name] == value).all() for name, value in weights(task / "runs" / "whole").items())


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        (["seed=9"], ["seed: 3 when the checkpoint was written, now 9"]),
        (["actor.model={task}/demo"], ["actor.model: ", "/model when the checkpoint was written, now "]),
        (["data.path={task}/copy.jsonl"], ["data.path: ", "prompts.jsonl when the checkpoint was written, now "]),
        (
            ["rollout.batch_size=8", "train.batch_size=32"],
            ["rollout.batch_size: 4 when", "train.batch_size: 16 when", "set them back, or start a new run"],
        ),
    ],
)
def test_another_config_is_refused_key_by_key(task, broken, capsys, changes, messages):
    """Scenario 24: seed, model, data, sizes."""
    shutil.copy(task / "prompts.jsonl", task / "copy.jsonl")
    message = refused(broken, capsys, *(change.format(task=task) for change in changes), code=2)
    assert all(part in message for part in messages)


def test_more_or_fewer_rows_are_refused(tmp_path, capsys):
    """Scenario 24: the file that the config names has changed."""
    task = make_task(tmp_path)
    with stopped_after_saving():
        start(loads(rl_yaml(task), ["train.num_episodes=2", "checkpoint.every=2"]))
    rows = (task / "prompts.jsonl").read_text().splitlines()
    (task / "prompts.jsonl").write_text("\n".join([*rows, rows[0].replace("1+2", "2+2")]))
    assert main(["resume", str(task / "runs" / "run")]) == 2
    assert "saved with num_prompts 8, and now it is 9" in capsys.readouterr().err


@pytest.mark.long
def test_another_backend_and_stage_go_on_with_what_one_began(task, broken):
    """Scenario 24: FSDP2, then ZeRO 1, then FSDP2 again. Sums differ in their last bits, hence 1e-5."""
    assert main(["resume", str(broken), "train.backend=deepspeed", "train.deepspeed.zero_stage=1"]) == 0
    shutil.rmtree(broken / "checkpoints" / "step-000004")
    (broken / "model").rename(broken / "model of ZeRO")
    assert main(["resume", str(broken), "train.backend=fsdp"]) == 0
    for folder in ("model of ZeRO", "model"):
        found = load_file(broken / folder / "model.safetensors")
        for name, value in weights(task / "runs" / "whole").items():
            assert (found[name] - value).abs().max() < 1e-5


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_another_number_of_ranks_keeps_the_order_and_nearly_every_bit(task, broken):
    """Scenario 24: two ranks go on with what one began. Sums over ranks differ in their last bits, hence 1e-5."""
    env = own_environment()
    cluster = ["cluster.runtime=ray", "cluster.component_placement={actor: 0-1, rollout: 0}"]
    command = [sys.executable, "-m", "hotseat.cli.main", "resume", str(broken), *cluster]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=860)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "cluster.runtime: local when the checkpoint was written, now ray" in done.stdout
    assert json.loads((broken / "checkpoints" / "step-000004" / "state.json").read_text())["num_ranks"] == 2
    assert list(read_ledger(broken)) == list(read_ledger(task / "runs" / "whole"))
    found = weights(broken)
    for name, value in weights(task / "runs" / "whole").items():
        assert (found[name] - value).abs().max() < 1e-5
