"""Reward functions that misbehave, each in its process."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
from waiting import wait_until

from hotseat.errors import RunError, UserError
from hotseat.failed import Failed
from hotseat.rewards import RewardFunction, Score

pytestmark = pytest.mark.slow  # each starts processes

WAIT_S = 300.0
GOOD = "def reward_func(queries, prompts, labels):\n    return [float(len(query)) for query in queries]\n"


@pytest.fixture
def make(tmp_path):
    """Makes a reward function from source text, and closes it."""
    made = []

    def function(source: str, **options) -> RewardFunction:
        file = tmp_path / "rewards.py"
        file.write_text(source)
        options = {"retries": 0, "timeout_s": WAIT_S, **options}
        made.append(RewardFunction(file, **options))
        return made[-1]

    yield function
    for one in made:
        one.close()
        assert not one.pids


def score(function: RewardFunction, num: int = 2, **given) -> list:
    return submit(function, num, **given).result(WAIT_S)


def submit(function: RewardFunction, num: int = 2, prompt: str = "p", label: str | None = None) -> Future:
    queries = [f"{prompt}{'x' * number}" for number in range(num)]
    return function.submit(queries, [prompt] * num, [label] * num, [f"0/7/{number}" for number in range(num)])


def test_a_cause_has_one_traceback_and_then_a_count(make, capfd):
    function = make(body("raise ValueError(f'no number in {queries[0]!r}')"))
    futures = [submit(function, 1, prompt=f"prompt {number}") for number in range(25)]
    assert len({future.result(WAIT_S)[0].reason for future in futures}) == 25
    log = capfd.readouterr().err
    assert log.count("Traceback") == 1
    assert log.count("raised 10 times by now, the last time: ValueError: no number in 'prompt 9' at line 2\n") == 1
    assert len(log.splitlines()) < 15
    notes = []
    submit(make(body("raise ValueError('no')"), say=notes.append), 1).result(WAIT_S)
    assert [(note.count("Traceback"), note.splitlines()[-1]) for note in notes] == [(1, "ValueError: no")]


def test_a_cause_has_one_traceback_over_all_processes(make):
    notes = []
    failing = body("import os", "if 'hangs' in queries[0]: os._exit(1)", "raise ValueError('no')")
    function = make(failing, say=notes.append)
    for number in range(4):
        score(function, 1, prompt=f"prompt {number}")
        score(function, 1, prompt="hangs")  # the next answer is that of another process
    for future in [submit(function, 1, prompt=f"again {number}") for number in range(6)]:
        future.result(WAIT_S)
    assert [note.splitlines()[-1] for note in notes] == [
        "ValueError: no",
        "raised 10 times by now, the last time: ValueError: no at line 4",
    ]


def test_the_first_time_out_is_a_line_and_the_others_are_not(make, capfd):
    function = make(body("import time", "time.sleep(600)"), timeout_s=0.3)
    first, second = submit(function, 8), submit(function, 8)
    assert {each.reason for each in first.result(WAIT_S)} == {each.reason for each in second.result(WAIT_S)}
    [line] = capfd.readouterr().err.splitlines()
    assert "rewards.py: reward_func: no answer within 0.3 s (reward.timeout_s) for samples 0/7/0, 0/7/1," in line
    assert line.endswith("they have failed. Later time-outs are counted, not shown")


def test_labels_of_every_type_arrive_as_they_are(make):
    labels = [4, 2.5, True, ["a", None], {"a": [1]}, "4", ""]
    function = make(body(f"return [float(labels == {labels!r} and list(map(type, labels))[2] is bool)] * len(labels)"))
    scores = function.submit(["q"] * 7, ["q"] * 7, labels, list(range(7))).result(WAIT_S)
    assert scores == [Score(1.0, 1.0)] * 7
    with RewardFunction("exact_match", retries=0) as exact:
        scores = exact.submit(["q4", "q[1]", "q", "q"], ["q"] * 4, [4, [1], "", None], list(range(4))).result(WAIT_S)
    assert scores[:2] == [Score(1.0, 1.0)] * 2
    assert all(isinstance(each, Failed) for each in scores[2:])  # without a label there is nothing to compare with


def body(*lines: str) -> str:
    return "def reward_func(queries, prompts, labels):\n" + "".join(f"    {line}\n" for line in lines)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# --- what works -------------------------------------------------------------------------------------------------------


def test_one_call_per_group_in_sample_order(make):
    function = make(
        "calls = 0\ndef reward_func(queries, prompts, labels, **kwargs):\n    global calls\n    calls += 1\n"
        "    rewards = [len(query) - len(prompt) for query, prompt in zip(queries, prompts)]\n"
        "    scores = [float(label) for label in labels]\n"
        "    return {'rewards': rewards, 'scores': scores, 'extra_logs': {'calls': calls}}\n"
    )
    assert score(function, 3, label="0.5") == [Score(float(n), 0.5, {"calls": 1.0}) for n in range(3)]
    assert score(function, 1, label="1")[0].extra == {"calls": 2.0}


def test_a_coroutine_is_awaited(make):
    assert score(make("async " + GOOD)) == [Score(1.0, 1.0), Score(2.0, 2.0)]


@pytest.mark.long
def test_tensors_as_in_the_openrlhf_guide(make):
    function = make(
        "import torch\n"
        + body(
            "rewards = torch.tensor([1.0 if label in query else -1.0 for query, label in zip(queries, labels)])",
            "logs = {'custom_metric': rewards, 'mean': rewards.mean()}",
            "return {'rewards': rewards, 'scores': (rewards + 1.0) / 2.0, 'extra_logs': logs}",
        )
    )
    expected = {0: Score(-1.0, 0.0, {"custom_metric": -1.0, "mean": 0.0})}
    assert score(function, label="x") == [expected[0], Score(1.0, 1.0, {"custom_metric": 1.0, "mean": 0.0})]


def test_siblings_can_be_imported_and_prints_go_to_standard_error(make, tmp_path, capfd):
    (tmp_path / "helper_of_rewards.py").write_text("VALUE = 3\n")
    function = make(
        "import helper_of_rewards\n" + body("print('seen', queries)", "return [helper_of_rewards.VALUE] * 2")
    )
    assert score(function)[0].reward == 3.0
    assert "seen ['p', 'px']" in capfd.readouterr().err


def test_text_of_any_kind_and_length_gets_through(make):
    function = make(body("return [float(len(query)) for query in queries]"))
    text = "\ud800 \0 é " + "x" * 3_000_000
    assert function.submit([text], ["p"], [None], ["0"]).result(WAIT_S)[0].reward == len(text)


def test_a_named_function_and_a_built_in_one(tmp_path):
    file = tmp_path / "many.py"
    file.write_text("def other(queries, prompts, labels):\n    return [5] * len(queries)\n")
    with RewardFunction(f"{file}:other") as function:
        assert score(function)[0].reward == 5.0
    with RewardFunction("exact_match") as function:
        assert [sample.reward for sample in score(function, label="x")] == [0.0, 1.0]


# --- what cannot be used ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def reward(q, p, l): pass\n", "AttributeError: no function reward_func in it; it has: reward"),
        ("def reward_func(:\n", "SyntaxError: invalid syntax at line 1"),
        ("x = 1\nimport no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module' at line 2"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3 at line 2"),
        ("import os\nos._exit(3)\n", "its process exited with code 3"),
        ("def reward_func(queries): pass\n", "reward_func(queries) cannot be called with queries, prompts, labels"),
    ],
)
def test_files_that_cannot_be_used(make, source, message):
    with pytest.raises(UserError) as caught:
        make(source)
    assert "rewards.py: reward_func: cannot be used as a reward function: " in str(caught.value)
    assert message in str(caught.value)


def test_a_file_that_does_not_exist(tmp_path):
    with pytest.raises(UserError, match=r"no such file: .*nothing.py; give a Python file with reward_func"):
        RewardFunction(tmp_path / "nothing.py")


def test_a_file_that_does_not_load_in_time(make):
    with pytest.raises(UserError, match="it did not load within 0.3 s"):
        make("import time\ntime.sleep(100)\n", start_timeout_s=0.3)


# --- what fails -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (body("raise KeyError('x')"), "raised KeyError: 'x' at line 2"),
        (body("return None"), "returned None"),
        (body("return [1.0]"), "returned 1 rewards for 2 samples"),
        (body("return {'score': [1, 2]}"), "did you mean 'scores'?"),
        (body("return ['a', 'b']"), "returned rewards with 'a' for sample 0, not a number"),
        (body("import sys", "sys.exit(1)"), "raised SystemExit: 1 at line 3"),
        (body("import os", "os._exit(7)"), "its process exited with code 7"),
        (body("import ctypes", "ctypes.string_at(0)"), "its process was ended by SIGSEGV"),
        (body("import os", "os.abort()"), "its process was ended by SIGABRT"),
        (body("raise RecursionError"), "raised RecursionError"),
    ],
)
def test_what_a_function_can_do_wrong(make, source, reason):
    """Scenario 31."""
    function = make(source, retries=1)
    samples = score(function)
    assert samples[0] == samples[1]
    assert reason in samples[0].reason
    assert samples[0].reason.endswith("(2 attempts; samples 0/7/0, 0/7/1)")
    assert "rewards.py: reward_func: " in samples[0].reason


def test_a_function_that_hangs_is_ended_with_all_that_it_started(make, tmp_path):
    """Scenarios 28 and 31."""
    function = make(
        "import os, subprocess\nchild = subprocess.Popen(['sleep', '300'])\n"
        f"open({str(tmp_path / 'pids')!r}, 'a').write(f'{{os.getpid()}} {{child.pid}} ')\n" + body("child.wait()"),
        timeout_s=0.5,
        retries=1,
    )
    assert "did not answer within 0.5 s (2 attempts;" in score(function)[0].reason
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 4
    wait_until(lambda: not any(map(is_alive, pids)))


def test_a_worker_that_is_stopped_counts_as_hanging(make):
    function = make(body("import os, signal", "os.kill(os.getpid(), signal.SIGSTOP)"), timeout_s=0.5)
    assert "did not answer within 0.5 s" in score(function)[0].reason


def test_a_function_that_asks_for_too_much_memory(make):
    """Scenario 31."""
    function = make(body("return [float(len(bytearray(10 << 30)))] * 2"), max_memory_bytes=1 << 30)
    assert "raised MemoryError" in score(function)[0].reason


def test_a_pipe_that_somebody_else_writes_to(make):
    noise = (
        "import os",
        "for pipe in map(int, os.listdir('/proc/self/fd')):",
        "    try: pipe > 2 and os.write(pipe, b'x' * 64)",
        "    except OSError: pass",
    )
    assert "its answer cannot be read" in score(make(body(*noise, "return [1.0, 1.0]")))[0].reason


def test_single_samples_fail_alone_and_the_best_attempt_counts(make, tmp_path):
    function = make(
        "import math, os\n"
        + body(
            f"with open({str(tmp_path / 'calls')!r}, 'a') as file: file.write('x')",
            f"call = os.path.getsize({str(tmp_path / 'calls')!r})",
            "if call == 3: os._exit(1)",
            "return [[1.0, math.nan, None], [1.0, 2.0, math.inf]][call - 1]",
        ),
        retries=2,
    )
    samples = score(function, 3)
    assert samples[:2] == [Score(1.0, 1.0), Score(2.0, 2.0)]
    assert samples[2].reason.endswith("rewards.py: reward_func: the reward is inf (3 attempts; sample 0/7/2)")


def test_a_failure_is_retried_in_a_fresh_process(make, tmp_path):
    function = make(
        "import os\n"
        + body(
            f"if not os.path.exists({str(tmp_path / 'x')!r}):",
            f"    open({str(tmp_path / 'x')!r}, 'w')",
            "    os._exit(1)",
        )
        + "    return [1.0] * 2\n",
        retries=1,
    )
    assert score(function) == [Score(1.0, 1.0)] * 2


def test_a_fresh_process_that_does_not_load_is_a_failed_attempt(make, tmp_path):
    function = make(body("import os", f"os.remove({str(tmp_path / 'rewards.py')!r})", "os._exit(1)"), retries=1)
    assert "could not be loaded again: FileNotFoundError" in score(function)[0].reason


def test_a_long_list_of_samples_is_shortened(make):
    samples = score(make(body("raise ValueError")), 12)
    assert samples[11].reason.endswith("samples 0/7/0, 0/7/1, 0/7/2, 0/7/3, 0/7/4, 0/7/5, 0/7/6, 0/7/7 and 4 more)")


# --- kills from outside -----------------------------------------------------------------------------------------------

NOTE_PID = (
    "import os, time\ndef reward_func(queries, prompts, labels):\n    open({0!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
)


def killer(tmp_path, num_kills: int) -> None:
    """Kills the worker of each attempt, so many times."""
    seen = tmp_path / "pids"
    for kill in range(1, num_kills + 1):
        wait_until(lambda at=kill: seen.exists() and len(seen.read_text().splitlines()) >= at)
        os.kill(int(seen.read_text().splitlines()[kill - 1]), signal.SIGKILL)


def test_a_kill_from_outside_does_not_use_up_a_retry(make, tmp_path):
    """Scenario 31."""
    pids = str(tmp_path / "pids")
    wait_on_first_two = f"    while len(open({pids!r}).readlines()) < 3: time.sleep(0.01)\n    return [1.0] * 2\n"
    function = make(NOTE_PID.format(pids) + wait_on_first_two, retries=0)
    future = submit(function)
    killer(tmp_path, 2)
    assert future.result(WAIT_S) == [Score(1.0, 1.0)] * 2


def test_too_many_kills_fail(make, tmp_path):
    function = make(NOTE_PID.format(str(tmp_path / "pids")) + "    time.sleep(10000)\n")
    future = submit(function)
    killer(tmp_path, 4)
    reason = future.result(WAIT_S)[0].reason
    assert "its process was ended by SIGKILL, killed 4 times (is there enough memory?) (1 attempt; samples" in reason


def test_a_worker_that_dies_between_groups_is_replaced(make):
    function = make(GOOD)
    (pid,) = function.pids
    os.kill(pid, signal.SIGSEGV)
    wait_until(lambda: not is_alive(pid))
    assert score(function)[1] == Score(2.0, 2.0)
    assert function.pids != [pid]


# --- ending -----------------------------------------------------------------------------------------------------------


def test_close_ends_workers_and_wakes_waiters(make, tmp_path):
    function = make(NOTE_PID.format(str(tmp_path / "pids")) + "    time.sleep(10000)\n")
    running, waiting, cancelled = submit(function), submit(function), submit(function)
    assert cancelled.cancel()
    wait_until((tmp_path / "pids").exists)
    pids = function.pids
    begin = time.monotonic()
    function.close()
    function.close()
    assert time.monotonic() - begin < WAIT_S / 2  # after which it would have been ended anyway
    for future in (running, waiting):
        with pytest.raises(RunError, match=r"rewards.py: reward_func: closed before it scored samples 0/7/0, 0/7/1"):
            future.result(0)
    assert not any(map(is_alive, pids))
    with pytest.raises(RunError, match="closed"):
        submit(function)


PARENT = """
import sys, time
from hotseat.rewards import RewardFunction
if __name__ == "__main__":
    function = RewardFunction(sys.argv[1])
    futures = [function.submit(["q"], ["p"], [None], ["0"]) for _ in range(2)]
    while not function.pids: time.sleep(0.01)
    print(*function.pids, flush=True)
    if sys.argv[2] == "wait": time.sleep(10000)
"""


@pytest.mark.parametrize("end", ["kill", "exit"])
def test_nothing_outlives_its_parent(tmp_path, end):
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "rewards.py").write_text("import time\n" + body("while True: time.sleep(1)"))
    command = [sys.executable, tmp_path / "parent.py", tmp_path / "rewards.py", "wait" if end == "kill" else "exit"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()}
    ) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 1
        if end == "kill":
            assert all(map(is_alive, pids))
            parent.kill()
        assert parent.wait(WAIT_S) == (-signal.SIGKILL if end == "kill" else 0)
    wait_until(lambda: not any(map(is_alive, pids)))


def test_chance_belongs_to_the_samples_and_not_to_the_process(tmp_path):
    """Scored again, by another process and in another order, a group meets the same chance; another group another."""
    file = tmp_path / "reward.py"
    file.write_text("import random\ndef reward_func(q, p, l):\n    return [random.random() for _ in q]\n")

    def scores(ids: list[str], seed: int | None = 1) -> list[list[float]]:
        with RewardFunction(file, seed=seed) as function:
            futures = [function.submit(["a", "b"], ["", ""], [None, None], [f"{name}/0", f"{name}/1"]) for name in ids]
            return [[score.reward for score in future.result(WAIT_S)] for future in futures]

    first, second = scores(["x", "y"]), scores(["y", "x"])
    assert first == second[::-1]
    assert first[0] != first[1]
    assert scores(["x"], seed=2) != [first[0]]


@pytest.mark.parametrize("value", [None, "ACTIVE"])
def test_its_openmp_threads_wait_as_the_user_says_or_asleep(make, monkeypatch, value):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if value is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", value)
    source = "import os\n" + body("return [float(os.environ['OMP_WAIT_POLICY'] == labels[0])] * len(queries)")
    found = score(make(source), label=value or "PASSIVE")
    assert [each.reward for each in found] == [1.0, 1.0]
