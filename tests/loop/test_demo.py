"""The demo's files."""

import json

import pytest

from hotseat.cli.demo import GRPO, SFT, free_directory, run_demo
from hotseat.config import loads
from hotseat.config.checks import missing
from hotseat.errors import UserError
from hotseat.loop.demo import make_files

NAMES = {
    "directory": "/d",
    "seed": 1,
    "model": "m",
    "examples": "e",
    "prompts": "p",
    "held_out": "h",
    "reward": "r.py",
    "num_prompts": 32,
}


@pytest.mark.slow
def test_the_same_seed_writes_the_same_files(tmp_path):
    a, b, c = (make_files(tmp_path / name, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert a.prompts.read_bytes() == b.prompts.read_bytes() != c.prompts.read_bytes()
    weights = "model.safetensors"
    assert (a.model / weights).read_bytes() == (b.model / weights).read_bytes() != (c.model / weights).read_bytes()
    held_out = {json.loads(line)["input"] for line in a.held_out.read_text().splitlines()}
    seen = {json.loads(line)["input"] for path in (a.prompts, a.examples) for line in path.read_text().splitlines()}
    assert len(held_out) == 200
    assert not held_out & seen


def test_the_configs_are_complete():
    for text in (SFT, GRPO):
        assert missing(loads(text.format(**NAMES))) == []


def test_a_directory_in_use_is_not_touched(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="is not empty: give another --dir"):
        run_demo(tmp_path, 0)


def test_another_demo_gets_a_directory_of_its_own(tmp_path):
    assert free_directory(tmp_path) == tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    assert free_directory(tmp_path) == tmp_path / "demo"
    (tmp_path / "demo" / "file").touch()
    assert free_directory(tmp_path) == tmp_path / "demo-2"
