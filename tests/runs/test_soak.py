"""The soak of `bench/soak.py`: 100 steps, 25 random kills."""

import subprocess
import sys
from pathlib import Path

import pytest
from environments import own_environment

SOAK = Path(__file__).parents[2] / "bench" / "soak.py"


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(1800)
def test_nothing_is_lost_doubled_or_different_after_25_kills():
    env = own_environment()
    done = subprocess.run([sys.executable, str(SOAK), "--seed", "1"], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    told = " ".join(done.stdout.split())
    assert "100 steps, 25 kills" in told
    assert "lost 0, doubled 0, strange 0, weights equal" in told
