"""Simulators in child processes: every family passes one suite; a process that dies or hangs is replaced."""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import conformance

from hotseat.envs.loading import SimulatorSettings, family_names, import_problem, make_simulator, path_problem
from hotseat.envs.processes import ProcessEnv
from hotseat.envs.simulator import ActionSpec
from hotseat.envs.tokens import NumberTokens
from hotseat.errors import UserError

WALK = str(Path(__file__).parent / "walk_env.py")


def walk(num_envs: int = 2, said: list[str] | None = None, num_processes: int = 1, timeout_s: float = 60.0, **kwargs):
    settings = SimulatorSettings(WALK, ("left", "right"), 12, kwargs)
    say = (lambda text: None) if said is None else said.append
    return ProcessEnv(settings, num_envs, num_processes=num_processes, timeout_s=timeout_s, say=say)


@pytest.mark.slow
def test_a_file_of_a_user_conforms():
    conformance.check(lambda num_envs: walk(num_envs, num_processes=2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "tasks", "kwargs"),
    [
        ("gym", ("CartPole-v1",), {"render_mode": "rgb_array"}),
        ("babyai", ("BabyAI-GoToRedBallGrey-v0", "BabyAI-PickupLoc-v0"), {"render_mode": "rgb_array"}),
    ],
)
def test_families_conform(path, tasks, kwargs):
    if import_problem(path) is not None:
        pytest.skip(import_problem(path))
    settings = SimulatorSettings(path, tasks, 16, kwargs)
    conformance.check(lambda num_envs: ProcessEnv(settings, num_envs))


def play(env: ProcessEnv, before_chunk=lambda chunk: None) -> list[bytes]:
    """Play both slots for four chunks of three actions; return digests of everything seen."""
    env.reset([0, 1], [0, 1], [5, 6])
    digests = []
    for chunk in range(4):
        before_chunk(chunk)
        actions = np.stack([conformance.actions_of(env, seed, chunk) for seed in (5, 6)])
        outcome = env.step([0, 1], actions)
        assert not outcome.failures
        digests += [conformance.row_digest(outcome, row) for row in (0, 1)]
    return digests


@pytest.fixture(scope="module")
def undisturbed():
    env = walk()
    yield play(env)
    env.close()


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 3])
def test_a_killed_process_changes_nothing(undisturbed, at):
    said: list[str] = []
    env = walk(said=said)

    def kill(chunk: int) -> None:
        if chunk == at:
            os.kill(env.pids()[0], signal.SIGKILL)

    assert play(env, kill) == undisturbed
    assert env.num_replaced == 1
    assert f"task left, seed 5, at action {3 * at}: its process died by signal 9" in said[0]
    env.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dies", "hangs"])
def test_a_simulator_that_ends_or_hangs_in_a_step_is_named_and_replaced(undisturbed, tmp_path, kind):
    said: list[str] = []
    env = walk(said=said, timeout_s=4.0 if kind == "hangs" else 60.0, trouble=(kind, 6, 4, 1), folder=str(tmp_path))
    assert play(env) == undisturbed
    problem = "did not answer in 4 s" if kind == "hangs" else "its process died with exit code 3"
    assert len(said) == 1
    assert "task right, seed 6, at action 3" in said[0]
    assert problem in said[0]
    env.close()


@pytest.mark.slow
def test_a_simulator_that_fails_again_and_again_ends_its_episode_and_no_other(tmp_path):
    env = walk(trouble=("dies", 6, 4, 99), folder=str(tmp_path))
    env.reset([0, 1], [0, 1], [5, 6])
    for chunk in range(2):
        outcome = env.step([0, 1], np.stack([conformance.actions_of(env, seed, chunk) for seed in (5, 6)]))
    assert list(outcome.failures) == [1]
    assert "seed 6, at action 3: its process died with exit code 3, 3 times in a row" in outcome.failures[1]
    assert outcome.num_taken.tolist() == [3, 0]
    outcome = env.step([0], conformance.actions_of(env, 5, 2)[None])
    assert not outcome.failures
    env.close()


@pytest.mark.slow
def test_an_exception_of_a_simulator_fails_its_episode(tmp_path):
    empty = tmp_path / "empty.py"
    empty.write_text("")
    with pytest.raises(UserError, match=r"env.path: .*empty.py has no function make"):
        ProcessEnv(SimulatorSettings(str(empty)), 1)
    env = walk(trouble=("raises", 5, 0, 99), folder=str(tmp_path))
    env.reset([0, 1], [0, 1], [5, 6])
    outcome = env.step([0, 1], np.zeros((2, 1, 2)))
    assert list(outcome.failures) == [0]
    assert "task left, seed 5, at action 0: ValueError: the line is broken" in outcome.failures[0]
    assert env.num_replaced == 0
    env.close()


def test_wrong_settings_are_refused(tmp_path):
    assert "gym" in family_names()
    assert path_problem("gym") is None
    assert "no simulator 'gim': name one of babyai, gym, or a file" in path_problem("gim")
    assert path_problem("none.py") == "there is no file none.py"
    empty = tmp_path / "empty.py"
    empty.write_text("")
    with pytest.raises(UserError, match=r"empty.py has no function make"):
        make_simulator(SimulatorSettings(str(empty)))
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_module")
    with pytest.raises(UserError, match=r"broken.py: ModuleNotFoundError: No module named 'no_such_module'"):
        make_simulator(SimulatorSettings(str(broken)))


def test_simulators_that_cannot_start_are_named_before_a_model_loads(monkeypatch):
    from hotseat.config.load import loads
    from hotseat.loop.setup.refusals import obstacles

    def messages(text: str) -> dict[str, str]:
        return dict(obstacles(loads(text)))

    assert "no simulator 'gim'" in messages("env: {path: gim}")["env.path"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    wanted = "gym needs the package gymnasium: pip install 'hotseat[sim]'"
    assert messages("env: {path: gym, tasks: [CartPole-v1]}")["env.path"] == wanted
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert "name some, such as CartPole-v1" in messages("env: {path: gym}")["env.tasks"]


def test_observations_that_a_policy_cannot_read_are_refused():
    from hotseat.envs.simulator import Seen
    from hotseat.loop.workers.simulation import Reader, SimulationSettings

    class Space:
        action = ActionSpec.numbered(3)
        state_bounds = (np.zeros(2, dtype=np.float32), np.ones(2, dtype=np.float32))

    class Words:
        def __call__(self, text, add_special_tokens):
            return {"input_ids": [len(word) for word in text.split()]}

        def __len__(self):
            return 300

    settings = SimulationSettings(SimulatorSettings("gym"), 1, 1, 1, 2, 4, 1.0, False, False, False)
    reader = Reader(settings, Words(), 8, Space())
    # Two numbers of four bins between 0 and 1, after the words: bins 0 and 3 are tokens 299 and 296.
    seen = Seen(instruction="go on", text="red", state=np.array([0.1, 0.9], dtype=np.float32))
    assert reader.encode(seen) == [2, 2, 3, 299, 296]
    with pytest.raises(UserError, match="its observations are pictures alone"):
        reader.encode(Seen(image=np.zeros((2, 2, 3), dtype=np.uint8)))
    with pytest.raises(UserError, match="has 7 tokens, and its actions 2: set it to 9 or more"):
        reader.encode(Seen(text="a b c d e f g"))


def test_actions_are_the_last_tokens_of_the_vocabulary():
    steering = NumberTokens.of_actions(ActionSpec((-1.0, 0.0), (1.0, 10.0)), bins=4, vocab_size=100)
    # Bins of the first number: -1, -0.5, 0, 0.5 and up; of the second: 0, 2.5, 5, 7.5.
    assert steering.encode(np.array([[-1.0, 10.0], [0.1, 2.4]])) == [99, 96, 97, 99]
    assert steering.decode([99, 96, 97, 99]).tolist() == [[-0.75, 8.75], [0.25, 1.25]]
    assert steering.decode([3, 98]).tolist() == [[0.75, 3.75]]  # 3 is no bin: the last one
    assert steering.is_bin(96)
    assert not steering.is_bin(95)
    buttons = NumberTokens.of_actions(ActionSpec.numbered(7), bins=256, vocab_size=100)
    assert buttons.encode(np.array([[0.0], [6.0]])) == [99, 93]
    assert buttons.decode([99, 93, 5]).tolist() == [[0.0], [6.0], [6.0]]
    with pytest.raises(UserError, match="256 bins, but the vocabulary has 100 tokens"):
        NumberTokens.of_actions(ActionSpec((0.0,), (1.0,)), bins=256, vocab_size=100)
