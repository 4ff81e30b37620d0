"""Rewards for generated code, which runs in Hotseat's sandbox.

1 if it passes all tests, 0.3 if it passes some, 0 if none, -0.5 if it runs out of time, -1 if it crashes in every test.
A label is a JSON list of tests: [{"input": "2 3", "output": "5"}] or [{"call": "add(2, 3)", "result": 5}].
"""

from hotseat.rewards import Sandbox, SandboxError, SandboxSettings, last_block, read_tests

sandbox = Sandbox(SandboxSettings(timeout_s=10.0, max_cpu_s=2.0))
sandbox.probe()  # raises if bubblewrap is missing or may not be used on this machine


def reward_of(answer, label):
    program = last_block(answer)
    passed = []
    has_crashed = True
    for test in read_tests(label):
        run = sandbox.run(program, test.stdin, test.call)
        if run.end in ("time", "cpu"):
            return -0.5
        has_crashed = has_crashed and not run.is_success
        passed.append(test.is_passed(run))
    if has_crashed:
        return -1.0
    return 1.0 if all(passed) else 0.3 if any(passed) else 0.0


def reward_func(queries, prompts, labels):
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        try:
            rewards.append(reward_of(query[len(prompt) :], label))
        except SandboxError as error:
            print(f"the sandbox failed: {error}")
            rewards.append(None)  # not scored, which is no zero
    return {
        "rewards": rewards,
        "scores": [None if reward is None else (reward + 1.0) / 2.0 for reward in rewards],
        "extra_logs": {"code_correctness": rewards},
    }
