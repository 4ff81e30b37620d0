"""The user's code in a process that is not its own."""

import subprocess
import sys

import pytest

CODE = """
import sys
from hotseat.agents.episode_output import EpisodeLog, current_log
from hotseat.loop.workers.host_settings import HostSettings, ScorerSettings
from hotseat.loop.workers.hosted_code import HostedCode
from hotseat.model_source import ModelSource

settings = HostSettings(ModelSource("none"), 0, 16, sys.argv[1], None, 1, 60.0, ScorerSettings())
for _ in range(2):  # as where a host of the process has taken the place of another
    HostedCode(settings)
current_log.set(EpisodeLog("0/27/1"))
exec(compile(open(sys.argv[1]).read(), sys.argv[1], "exec"))
"""


@pytest.mark.slow
def test_an_episode_that_ends_the_run_is_named_with_code_file_and_line(tmp_path):
    agent = tmp_path / "agent.py"
    agent.write_text("import os\n\nos._exit(9)\n")
    ended = subprocess.run([sys.executable, "-c", CODE, str(agent)], capture_output=True, text=True)
    said = "sample 0/27/1 ends the run, in whose process agents are (cluster.runtime is local)"
    assert ended.returncode == 9
    assert ended.stderr == f"hotseat: {said}: exit code 9, by os._exit at {agent}:3\n"
