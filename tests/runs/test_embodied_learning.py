"""The embodied example from its commands: it begins at 25% or less on held-out seeds, and learns to 80% or more."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "embodied"
pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]


def command(folder: Path, *words: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *words], cwd=folder, env=environment, check=True)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("kind", "arguments"), [("grpo", []), ("ppo", ["--chunk", "2", "--at-random", "0.85"])])
def test_a_policy_learns_from_pixels_and_words(tmp_path, kind, arguments, seed):
    pytest.importorskip("minigrid")
    shutil.copytree(EXAMPLE, tmp_path / "examples" / "embodied")
    command(tmp_path, "examples/embodied/policy.py", "embodied", "--seed", str(seed), *arguments)
    for file in ("sft", kind):
        command(tmp_path, "-m", "hotseat", "run", f"examples/embodied/{file}.yaml", f"seed={seed}")
    metrics = (tmp_path / "runs" / f"embodied-{kind}" / "metrics.jsonl").read_text().splitlines()
    success = [found for line in metrics if (found := json.loads(line).get("eval/success")) is not None]
    assert success[0] <= 0.25
    assert success[-1] >= 0.8
