"""Simulators in child processes: every family passes one suite; a process that dies or hangs is replaced."""

import contextlib
import os
import select
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import simulator_conformance as conformance

from hotseat.config.schema.rollout_options import EnvConfig
from hotseat.data.frames import film_of_pictures
from hotseat.envs.family_loading import (
    SimulatorSettings,
    import_problem,
    load_family,
    path_problem,
)
from hotseat.envs.processes import Outcome, ProcessEnv, _Child
from hotseat.envs.simulator import ActionSpec, Observation, SimulatorStep, Task
from hotseat.envs.simulator_child import _answers, _step
from hotseat.envs.tokens import NumberTokens
from hotseat.errors import UserError
from hotseat.loop.workers.observations import SimulationSettings
from hotseat.processes import WorkerDied, WorkerTimeout

WALK = str(Path(__file__).parents[1] / "helpers" / "walk_env.py")
WALKS = str(Path(__file__).parents[1] / "helpers" / "walks_env.py")


def make_simulator(settings: SimulatorSettings):
    return load_family(settings).make(list(settings.tasks), settings.max_steps, **settings.kwargs)


def simulation(simulator: SimulatorSettings, **env) -> SimulationSettings:
    """Settings of one simulator whose numbers have four bins."""
    section = EnvConfig(**({"num_envs": 1, "bins": 4, "step_timeout_s": 1.0} | env))
    return SimulationSettings(simulator, section, 1, has_turn_rewards=False, bootstraps=False)


def walk(num_envs: int = 2, said: list[str] | None = None, num_processes: int = 1, cls=ProcessEnv, path=WALK, **kwargs):
    settings = SimulatorSettings(path, ("left", "right"), 12, kwargs)
    say = (lambda text: None) if said is None else said.append
    return cls(settings, num_envs, num_processes=num_processes, say=say)


@pytest.mark.slow
@pytest.mark.parametrize("path", [pytest.param(WALK, id="one"), pytest.param(WALKS, id="batch")])
def test_a_file_of_a_user_conforms(path):
    conformance.check(lambda num_envs: walk(num_envs, num_processes=2, is_on_device=True, path=path))


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
@pytest.mark.parametrize(("at", "path"), [(0, WALK), (3, WALK), (2, WALKS)], ids=["first", "last", "batch"])
def test_a_killed_process_changes_nothing(undisturbed, at, path):
    said: list[str] = []
    env = walk(said=said, path=path)

    def kill(chunk: int) -> None:
        if chunk == at:
            os.kill(env.pids()[0], signal.SIGKILL)

    assert play(env, kill) == undisturbed
    assert env.num_replaced == 1
    assert f"task left, seed 5, at action {3 * at}: its process died by signal 9" in said[0]
    env.close()


@pytest.mark.slow
def test_a_process_that_dies_while_simulators_are_offloaded_is_replaced(undisturbed):
    said: list[str] = []
    env = walk(said=said, is_on_device=True)

    def offload(chunk: int) -> None:
        if chunk == 2:
            env.offload()
            [standby] = env._children
            os.kill(standby.process.pid, signal.SIGKILL)
            standby.process.wait()
            env.onload()

    assert play(env, offload) == undisturbed
    assert said == [f"a process of simulator {WALK} died while it started; another process replaces it"]
    assert env.num_replaced == 1
    env.close()


class UntilItHangs(ProcessEnv):
    """Has no patience with a simulator that has begun to hang, which writes a file before, and any with all others."""

    marker: Path
    has_given_up = False

    def _spawn(self):
        env = self

        class Child(_Child):
            def receive(self, timeout_s):
                while not self._received and not select.select([self.socket], [], [], 0.01)[0]:
                    # What was answered before it began to hang is there by now.
                    if env.marker.exists() and not env.has_given_up and not select.select([self.socket], [], [], 0)[0]:
                        env.has_given_up = True
                        raise WorkerTimeout
                return super().receive(timeout_s)

        return Child(self._settings)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dies", "hangs"])
def test_a_simulator_that_ends_or_hangs_in_a_step_is_named_and_replaced(undisturbed, tmp_path, kind):
    said: list[str] = []
    UntilItHangs.marker = tmp_path / "times"
    cls = UntilItHangs if kind == "hangs" else ProcessEnv
    env = walk(said=said, cls=cls, trouble=(kind, 6, 4, 1), folder=str(tmp_path))
    assert play(env) == undisturbed
    problem = "did not answer in 60 s" if kind == "hangs" else "its process died with exit code 3"
    assert len(said) == 1
    assert "task right, seed 6, at action 3" in said[0]
    assert problem in said[0]
    env.close()


@pytest.mark.slow
@pytest.mark.parametrize("path", [pytest.param(WALK, id="one"), pytest.param(WALKS, id="batch")])
def test_a_simulator_that_fails_again_and_again_ends_its_episode_and_no_other(tmp_path, path):
    env = walk(trouble=("dies", 6, 4, 99), folder=str(tmp_path), path=path)
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
@pytest.mark.parametrize("path", [pytest.param(WALK, id="one"), pytest.param(WALKS, id="batch")])
def test_an_exception_of_a_simulator_fails_its_episode(tmp_path, path):
    empty = tmp_path / "empty.py"
    empty.write_text("")
    with pytest.raises(UserError, match=r"env.path: .*empty.py has no function make"):
        ProcessEnv(SimulatorSettings(str(empty)), 1)
    env = walk(trouble=("raises", 5, 0, 99), folder=str(tmp_path), path=path)
    env.reset([0, 1], [0, 1], [5, 6])
    outcome = env.step([0, 1], np.zeros((2, 1, 2)))
    assert list(outcome.failures) == [0]
    assert "task left, seed 5, at action 0: ValueError: the line is broken" in outcome.failures[0]
    assert env.num_replaced == 0
    env.close()


def test_a_batch_that_returns_too_few_results_fails_its_episodes():
    """Whoever waits for the others would wait in vain."""

    class TooFew:
        tasks, action, state_bounds, is_on_device = (), ActionSpec.numbered(2), None, False

        def reset(self, where, tasks, seeds):
            return [Observation("go")]

    assert list(_answers(TooFew(), "reset", [0], [(0, 1)])) == [("done", Observation("go"))]
    for kind, problem in _answers(TooFew(), "reset", [0, 1], [(0, 1), (0, 2)]):
        assert kind == "failed"
        assert problem.startswith("ValueError: reset returned 1 results for 2 worlds")


HELPED = """
import subprocess
from pathlib import Path
from walk_env import Walk

class Helped(Walk):
    def __init__(self, pipe, closed):
        super().__init__(["left"], 3, None, None)
        self.closed = Path(closed)
        with open(pipe, "w") as held:
            subprocess.Popen(["sleep", "3600"], stdout=held)

    def close(self):
        self.closed.write_text("closed")

def make(tasks, max_steps=None, **kwargs):
    return Helped(**kwargs)
"""


@pytest.mark.slow
def test_simulators_are_closed_and_their_helpers_end_with_them(tmp_path):
    file, pipe, closed = tmp_path / "helped.py", tmp_path / "pipe", tmp_path / "closed"
    file.write_text(HELPED)
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    env = ProcessEnv(SimulatorSettings(str(file), kwargs={"pipe": str(pipe), "closed": str(closed)}), 1)
    assert not select.select([reading], [], [], 0)[0]  # the helper has it open
    env.close()
    assert closed.read_text() == "closed"
    assert select.select([reading], [], [], 60.0)[0], "the helper still runs"
    os.close(reading)


class DyingChild:
    """A process that dies in a step of a slot as often as `deaths` says."""

    is_met = True

    def __init__(self, deaths: dict[int, int]):
        self.deaths = deaths
        self.asked: list[tuple[str, int]] = []

    def send(self, message, timeout_s):
        name, items = message
        self.asked += [(name, slot) for slot, *_ in items]

    def receive(self, timeout_s):
        name, slot = self.asked.pop(0)
        if name == "reset":
            return "done", Observation(text="begin")
        if self.deaths.get(slot, 0) > 0:
            self.deaths[slot] -= 1
            raise WorkerDied(None)
        return "done", (Observation(text="on"), [0.0], False, False, None)

    def hang_up(self):
        pass

    def end(self, grace_s):
        pass


class DyingEnv(ProcessEnv):
    tasks, action, state_bounds, num_state_values = (Task(0, "any"),), ActionSpec.numbered(2), None, None
    deaths: dict[int, int]

    def _spawn(self):
        return DyingChild(self.deaths)


def test_each_simulator_of_a_process_has_attempts_of_its_own():
    DyingEnv.deaths = {0: 2, 1: 2}
    env = DyingEnv(SimulatorSettings("any"), 2)
    env.reset([0, 1], [0, 0], [1, 2])
    outcome = env.step([0, 1], np.zeros((2, 1, 1)))
    assert not outcome.failures
    assert env.num_replaced == 4
    assert not outcome.is_success_known.any()
    DyingEnv.deaths = {0: 3, 1: 2}
    env = DyingEnv(SimulatorSettings("any"), 2)
    env.reset([0, 1], [0, 0], [1, 2])
    outcome = env.step([0, 1], np.zeros((2, 1, 1)))
    assert list(outcome.failures) == [0]
    assert "its process died, 3 times in a row" in outcome.failures[0]


def test_what_ends_with_the_last_step_allowed_did_not_run_out_of_time():
    class Both:
        def step(self, action):
            return SimulatorStep(Observation(text="end"), 1.0, terminated=True, truncated=True, success=True)

    worlds = SimpleNamespace(step=lambda where, actions: [_step(Both(), actions[0])])
    [(kind, answer)] = _answers(worlds, "step", [0], [(np.zeros((2, 1)),)])
    assert (kind, answer[1:]) == ("done", ([1.0], True, False, True))
    pytest.importorskip("gymnasium")
    simulator = make_simulator(SimulatorSettings("gym", ("CartPole-v1",), 1))
    simulator.reset(0, 0)
    simulator.environments[0].unwrapped.state = np.array([5.0, 0.0, 0.0, 0.0])  # beyond the end of the track
    step = simulator.step(np.zeros(1))
    assert (step.terminated, step.truncated) == (True, False)
    assert step.success is None  # CartPole does not say, and its reward is above 0 though the pole fell
    assert simulator._success({"is_success": np.bool_(True)}, False, 0.0) is True
    assert simulator._success({"success": 0.0}, True, 1.0) is False


def test_states_of_gymnasium_keep_their_bounds():
    gymnasium = pytest.importorskip("gymnasium")
    from hotseat.envs.families.gym import _num_values, _state_bounds

    infinite, largest = np.inf, np.finfo(np.float32).max
    low = np.array([-20.0, -infinite, -largest, 50.0, -infinite], dtype=np.float32)
    high = np.array([28.0, infinite, largest, infinite, -50.0], dtype=np.float32)
    bounds = _state_bounds(gymnasium.spaces.Box(low, high))
    assert [each.tolist() for each in bounds] == [[-20, -10, -10, 50, -60], [28, 10, 10, 60, -50]]
    with pytest.raises(UserError, match="env.tasks: the tasks have different observations: Box"):
        make_simulator(SimulatorSettings("gym", ("Acrobot-v1", "MountainCar-v0"), 5))
    spaces = {"place": gymnasium.spaces.Discrete(500), "hands": gymnasium.spaces.MultiDiscrete([3, 900])}
    assert _num_values(gymnasium.spaces.Dict(spaces)) == 900
    assert _num_values(gymnasium.spaces.Box(low, high)) is None


def test_a_reward_by_success_is_refused_where_nobody_knows_it():
    from hotseat.loop.workers.observations import _refuse_unknown_success

    class Env:
        """Says whether it succeeded in the steps from `said_at` on, and ends with the third."""

        action = ActionSpec.numbered(2)

        def __init__(self, said_at):
            self.said_at, self.num_steps = said_at, 0

        def step(self, where, actions):
            self.num_steps += 1
            no, is_last = np.array([False]), np.array([self.num_steps == 3])
            is_known = np.array([self.num_steps >= self.said_at])
            return Outcome([Observation()], np.zeros((1, 1)), np.ones(1), is_last, no, no, is_known, {})

    settings = simulation(SimulatorSettings("gym", ("Cart",)), chunk=2, reward="success")
    for said_at in (1, 3):
        env = Env(said_at)
        _refuse_unknown_success(settings, env)
        assert env.num_steps == said_at
    with pytest.raises(
        UserError, match="env.reward: success, but gym does not say whether an episode of Cart succeeds"
    ):
        _refuse_unknown_success(settings, Env(9))


def test_episodes_that_ended_are_forgotten():
    import asyncio

    from hotseat.loop.workers.simulation import SimulatorStage

    DyingEnv.deaths = {}
    thread = ThreadPoolExecutor(1)
    stage = SimulatorStage(DyingEnv(SimulatorSettings("any"), 3), thread)

    async def play():
        for slot in range(2):
            await stage.reset(slot, 0, slot)
            stage.leave(slot)
        await stage.reset(2, 0, 7)

    with thread, contextlib.closing(stage.env):
        asyncio.run(play())
        assert list(stage.env._episodes) == [2]
        stage.leave(2)
        stage.env.is_on_device = False
        stage.offload()
        assert not stage.env._episodes


def test_stages_of_a_host_step_one_after_another():
    import asyncio

    from hotseat.loop.workers.simulation import SimulatorStage

    inside = threading.Lock()

    class Alone(DyingEnv):
        def step(self, where, actions):
            assert inside.acquire(blocking=False), "two stages step at the same time"
            with contextlib.ExitStack() as leaving:
                leaving.callback(inside.release)
                time.sleep(0.001)  # so that the other stage would come in between
                return super().step(where, actions)

    DyingEnv.deaths = {}
    thread = ThreadPoolExecutor(1)
    stages = [SimulatorStage(Alone(SimulatorSettings("any"), 2), thread) for _ in range(2)]

    async def play(stage, slot):
        await stage.reset(slot, 0, slot)
        for _ in range(3):
            await stage.step(slot, np.zeros((1, 1)))
        stage.leave(slot)

    async def play_all():
        await asyncio.gather(*(play(stage, slot) for stage in stages for slot in range(2)))

    with thread:
        asyncio.run(play_all())
    for stage in stages:
        stage.env.close()


def test_engines_have_room_for_one_stage():
    from hotseat.config.load import loads
    from hotseat.planning.config_plan import make_plan, stage_slots

    def slots(placement: str, rollout: str) -> int:
        config = loads(
            f"cluster: {{inventory: 1x8, component_placement: {placement}}}\nactor: {{model: Qwen/Qwen2.5-0.5B}}\n"
            f"env: {{path: gym, tasks: [CartPole-v1], num_envs: 48}}\nrollout: {rollout}"
        )
        return stage_slots(config, make_plan(config))

    hybrid = "{actor: 0-7, env: 0-3, rollout: 4-7}"
    assert slots(hybrid, "{pipeline_stage_num: 1}") == 48  # of 4 x 48, an engine of four
    assert slots(hybrid, "{pipeline_stage_num: 2}") == 24
    assert slots("{actor: 0-7, env: 0-3, rollout: 5-7}", "{pipeline_stage_num: 4}") == 16
    assert slots("{actor: 0-7, env: 0-3, rollout: 5-7}", "{pipeline_stage_num: 3}") == 22  # 64 of three engines
    assert slots("{actor: 0-7, env: 0-3, rollout: 7}", "{pipeline_stage_num: 2}") == 64  # as many as it has


def test_engines_keep_prompts_in_the_room_of_slots_that_a_stage_does_not_need(tmp_path):
    from hotseat.config.load import loads
    from hotseat.loop.settings.rollout_settings import engine_settings

    config = loads(
        "actor: {model: none}\nenv: {path: gym, tasks: [CartPole-v1], num_envs: 48}\nrollout: {num_slots: 40}",
        ["train.dtype=fp32"],
    )
    kept = {count: engine_settings(config, (), tmp_path, num_slots=count).num_kept_prompts for count in (None, 40, 24)}
    assert kept == {None: 8, 40: 8, 24: 24}


def test_wrong_settings_are_refused(tmp_path):
    assert path_problem("gym") is None
    assert "no simulator 'gim': name one of babyai, gym, mujoco_warp, or a file" in path_problem("gim")
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
    from hotseat.checks.pipeline import startup_problems
    from hotseat.config.load import loads

    def messages(text: str) -> dict[str, str]:
        return {problem.key: problem.message for problem in startup_problems(loads(text))}

    assert "no simulator 'gim'" in messages("env: {path: gim}")["env.path"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    wanted = "gym needs the package gymnasium: pip install 'hotseat[sim]'"
    assert messages("env: {path: mujoco_warp, tasks: [push-red]}")["env.path"].endswith("pip install 'hotseat[warp]'")
    assert messages("env: {path: gym, tasks: [CartPole-v1]}")["env.path"] == wanted
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert "name some, such as CartPole-v1" in messages("env: {path: gym}")["env.tasks"]


def test_observations_that_a_policy_cannot_read_are_refused():
    from hotseat.loop.workers.observations import Reader

    class Space:
        action = ActionSpec.numbered(3)
        num_state_values = 4
        state_bounds = (np.zeros(2, dtype=np.float32), np.ones(2, dtype=np.float32))

    class Words:
        def __call__(self, text, add_special_tokens):
            return {"input_ids": [len(word) for word in text.split()]}

        def __len__(self):
            return 300

    settings = simulation(SimulatorSettings("gym"), chunk=2)
    reader = Reader(settings, Words(), 8, Space())
    # Two numbers of four bins between 0 and 1, after the words: bins 0 and 3 are tokens 299 and 296.
    seen = Observation(instruction="go on", text="red", state=np.array([0.1, 0.9], dtype=np.float32))
    assert reader.read(seen).token_ids == [2, 2, 3, 299, 296]
    with pytest.raises(UserError, match="its observations are pictures alone"):
        reader.read(Observation(image=np.zeros((2, 2, 3), dtype=np.uint8)))
    with pytest.raises(UserError, match="has 7 tokens, and its actions 2: set it to 9 or more"):
        reader.read(Observation(text="a b c d e f g"))
    Space.num_state_values = 5
    with pytest.raises(UserError, match="env.bins 4: a number in the observations of gym has 5 values"):
        Reader(settings, Words(), 8, Space())
    Space.num_state_values, Space.state_bounds = None, None
    with pytest.raises(UserError, match="its observations have numbers, and its state_bounds are None"):
        Reader(settings, Words(), 8, Space()).read(seen)


def test_actions_are_the_last_tokens_of_the_vocabulary():
    steering = NumberTokens.of_actions(ActionSpec((-1.0, 0.0), (1.0, 10.0)), bins=4, vocab_size=100)
    # Bins of the first number: -1, -0.5, 0, 0.5 and up; of the second: 0, 2.5, 5, 7.5.
    assert steering.encode(np.array([[-1.0, 10.0], [0.1, 2.4]])) == [99, 96, 97, 99]
    assert steering.decode([99, 96, 97, 99]).tolist() == [[-0.75, 8.75], [0.25, 1.25]]
    assert steering.decode([3, 98]).tolist() == [[0.75, 3.75]]  # 3 is no bin: the last one
    assert steering.is_bin(96)
    assert not steering.is_bin(95)
    assert not steering.is_bin(100)
    buttons = NumberTokens.of_actions(ActionSpec.numbered(7), bins=256, vocab_size=100)
    assert buttons.encode(np.array([[0.0], [6.0]])) == [99, 93]
    assert buttons.decode([99, 93, 5]).tolist() == [[0.0], [6.0], [6.0]]
    with pytest.raises(UserError, match="256 bins, but the vocabulary has 100 tokens"):
        NumberTokens.of_actions(ActionSpec((0.0,), (1.0,)), bins=256, vocab_size=100)


# A family whose pictures are larger than what goes through the pipe.
CAMERA = """
import numpy as np
from hotseat.envs.simulator import ActionSpec, Observation, SimulatorStep, Task

class Camera:
    tasks, action, state_bounds, is_on_device = [Task(0, "look")], ActionSpec((-1.0,), (1.0,)), None, False

    def reset(self, task, seed):
        self.seed, self.count = seed, 0
        return self.see()

    def see(self):
        size = 64 + 32 * self.count  # every frame is larger than the last
        noise = np.random.default_rng([self.seed, self.count])
        return Observation("look", image=noise.integers(0, 256, (size, size, 3), dtype=np.uint8))

    def step(self, action):
        self.count += 1
        return SimulatorStep(self.see(), 0.0, success=None)

    def render(self):
        return self.see().image

    def close(self):
        pass

def make(tasks, max_steps):
    return Camera()
"""


def frame_memory() -> set[str]:
    """Descriptors of memory for frames that this process has open. The memory has no name that could outlive it."""
    open_here = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            open_here[name] = os.readlink(f"/proc/self/fd/{name}")
    return {name for name, target in open_here.items() if "hotseat-frames" in target}


@pytest.mark.slow
@pytest.mark.parametrize("has_memory", [True, False])
def test_frames_come_whole_through_shared_memory_or_the_pipe_also_from_a_process_that_is_replaced(
    tmp_path, monkeypatch, has_memory
):
    if not has_memory:
        monkeypatch.setattr("hotseat.envs.processes.make_memory", lambda: None)
    path = tmp_path / "camera.py"
    path.write_text(CAMERA)
    before = frame_memory()
    env = ProcessEnv(SimulatorSettings(str(path)), 3)
    assert len(frame_memory() - before) == has_memory
    taken = [env.reset([0, 1, 2], [0, 0, 0], [4, 5, 6])]
    for turn in range(3):
        if turn == 1:
            os.kill(env.pids()[0], signal.SIGKILL)
        taken.append(env.step([0, 1, 2], np.zeros((3, 1, 1))).seen)
    assert env.num_replaced == 1
    assert env.render([1])[0].shape == (160, 160, 3)
    env.close()
    for count, seen in enumerate(taken):  # earlier ones were not overwritten by later ones
        for seed, each in zip((4, 5, 6), seen, strict=True):
            size = 64 + 32 * count
            expected = np.random.default_rng([seed, count]).integers(0, 256, (size, size, 3), dtype=np.uint8)
            assert np.array_equal(each.image, expected)
    assert frame_memory() <= before  # nothing stays of a process that was killed, or has ended


@pytest.mark.slow
def test_a_film_shows_the_world_before_the_first_and_after_every_action():
    from hotseat.loop.workers.observations import Films

    settings = simulation(SimulatorSettings(WALK, ("right",), 12), step_timeout_s=60.0, films=1)
    films, world = Films(settings), make_simulator(SimulatorSettings(WALK, ("right",), 12))
    actions = np.array([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    world.reset(0, 7)
    pictures = [world.render()]
    for action in actions:
        world.step(action)
        pictures.append(world.render())
    try:
        assert films.film(0, 7, actions) == film_of_pictures(pictures)
        with pytest.raises(UserError, match="holds memory of a device"):
            Films(replace(settings, simulator=SimulatorSettings(WALK, ("right",), 12, {"is_on_device": True})))
    finally:
        films.close()


def played_by_chunk_and_action(max_steps=12, bootstraps=False, **env):
    """Play an episode straight to its goal, with rewards of chunks of two actions, and with those of actions."""
    import asyncio

    from hotseat.loop.workers.simulation import Player
    from hotseat.types import Completion, Prompt, SampleKey, Sampling

    class Words:
        def __call__(self, text, add_special_tokens):
            return {"input_ids": [len(word) for word in text.split()]}

        def __len__(self):
            return 300

    async def sample(token_ids, sampling, number, images):
        tokens = (296,) * sampling.max_new_tokens  # the last bin: steps of a quarter towards the goal
        return Completion("", tokens, (0.0,) * len(tokens), (0,) * len(tokens), "length")

    found = []
    for has_action_rewards in (False, True):
        settings = simulation(SimulatorSettings(WALK, ("right",), max_steps), chunk=2, step_timeout_s=60.0, **env)
        settings = replace(
            settings, has_turn_rewards=True, has_action_rewards=has_action_rewards, bootstraps=bootstraps
        )
        player = Player(settings, Words(), 64)
        try:
            prompt = Prompt(0, "", (1,), label="0/7")
            found.append(asyncio.run(player.run(prompt, SampleKey(0, 0, 0), Sampling(8), sample)))
        finally:
            player.end()
    return found


@pytest.mark.parametrize("rewarded", ["simulator", "success"])
def test_rewards_of_an_episode_are_those_of_its_chunks_or_of_its_actions(rewarded):
    from hotseat.loop.workers.records import _rewards_of

    by_chunk, by_action = played_by_chunk_and_action(reward=rewarded)
    # It arrives in a few steps: each costs 0.01, and the last earns 1 besides.
    num_actions = by_chunk.episode.num_sampled // 2
    assert num_actions > len(by_chunk.turn_rewards) > 1
    costs = [0.0 if rewarded == "success" else -0.01] * num_actions
    assert by_action.turn_rewards == pytest.approx([*costs[1:], costs[0] + 1])
    assert len(by_chunk.turn_rewards) == len(by_chunk.episode.turn_lengths)
    assert by_chunk.reward == by_action.reward == pytest.approx(sum(by_action.turn_rewards))
    # Records have those of chunks in any case.
    assert _rewards_of(by_action) == pytest.approx(_rewards_of(by_chunk))


def test_relative_rewards_are_changes_since_the_action_before_across_chunks_too():
    by_chunk, by_action = played_by_chunk_and_action(reward_scale=5.0, relative_rewards=True)
    # Steps have -0.01, the last 0.99: times five and less the one before, of which the first has none.
    num_actions = by_action.episode.num_sampled // 2
    assert num_actions > 2
    assert by_action.turn_rewards == pytest.approx([-0.05, *[0.0] * (num_actions - 2), 5.0])
    assert sum(by_chunk.turn_rewards) == pytest.approx(4.95)
    assert by_chunk.turn_rewards[1] == pytest.approx(sum(by_action.turn_rewards[2:4]))
    assert by_chunk.reward == pytest.approx(4.95)


def test_success_is_scaled_too():
    by_chunk, by_action = played_by_chunk_and_action(reward="success", reward_scale=5.0)
    assert by_chunk.reward == by_action.reward == by_action.turn_rewards[-1] == 5.0
    assert by_action.score == 1.0


@pytest.mark.parametrize(
    ("max_steps", "of_both", "has_bootstrap"), [(12, False, False), (12, True, True), (1, False, True)]
)
def test_the_critic_values_what_follows_the_time_limit_and_if_asked_what_follows_a_task(
    max_steps, of_both, has_bootstrap
):
    episode = played_by_chunk_and_action(max_steps, bootstraps=True, bootstrap_terminated=of_both)[0].episode
    assert episode.has_bootstrap is has_bootstrap
    assert len(episode.segments) - len(episode.played_segments) == has_bootstrap
