"""The bench of many devices, in its smallest form."""

import subprocess
import sys
from pathlib import Path

import pytest
from environments import own_environment

SCALE = Path(__file__).parents[2] / "bench" / "scale.py"


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("staleness", [0, 1])
def test_simulated_devices_make_steps_through_relays(staleness):
    options = ["--devices", "256", "--samples", "256", "--steps", "2", "--staleness", str(staleness)]
    done = subprocess.run([sys.executable, str(SCALE), *options], capture_output=True, text=True, env=own_environment())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "SIMULATED devices" in done.stdout
