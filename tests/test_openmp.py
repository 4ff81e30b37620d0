"""The threads of every process that we start wait asleep, unless the user has said otherwise."""

import os
import subprocess
import sys

import pytest

from hotseat.openmp import WAIT_POLICY, wait_passively, wait_policy

# What a command leaves in its environment, and whether an OpenMP runtime could have been loaded before.
WATCHED = """
import atexit, os, sys
sys.argv[1:] = {arguments!r}
atexit.register(lambda: print("policy", os.environ.get("OMP_WAIT_POLICY"), "torch" in sys.modules))
from {module} import entry
entry({command})
"""


def test_the_policy_is_set_unless_the_user_has_set_it():
    environment: dict[str, str] = {}
    wait_passively(environment)
    assert environment == {WAIT_POLICY: "PASSIVE"}
    environment[WAIT_POLICY] = "ACTIVE"
    wait_passively(environment)
    assert environment == {WAIT_POLICY: "ACTIVE"}


def test_processes_to_be_started_get_the_users_own_value(monkeypatch):
    monkeypatch.delenv(WAIT_POLICY, raising=False)
    assert wait_policy() == {WAIT_POLICY: "PASSIVE"}
    monkeypatch.setenv(WAIT_POLICY, "ACTIVE")
    assert wait_policy() == {WAIT_POLICY: "ACTIVE"}


@pytest.mark.slow
@pytest.mark.parametrize("given", [None, "ACTIVE"])
@pytest.mark.parametrize(
    ("module", "arguments", "command"),
    [("hotseat.cli.main", ["--version"], ""), ("hotseat.openrlhf.run_command", ["--help"], "'train_sft'")],
)
def test_a_command_sets_it_for_itself_and_its_children_before_torch_is_loaded(module, arguments, command, given):
    environment = {name: value for name, value in os.environ.items() if name != WAIT_POLICY}
    environment |= {} if given is None else {WAIT_POLICY: given}
    text = WATCHED.format(module=module, arguments=arguments, command=command)
    done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"policy {given or 'PASSIVE'} False"
