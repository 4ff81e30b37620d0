"""Rewards for generated code, which runs in Hotseat's sandbox.

1 if it passes all tests, 0.3 if it passes some, 0 if none, -0.5 if it runs out of time, -1 if it crashes in every test.
A label is a JSON list of tests: [{"input": "2 3", "output": "5"}].
"""

import json

from hotseat import RunError, Sandbox, SandboxSettings

sandbox = Sandbox(SandboxSettings(timeout_s=10.0, max_cpu_s=2.0))
sandbox.probe()  # raises if bubblewrap is missing or may not be used on this machine


def code_of(answer):
    """Return the last block in triple backticks, or the whole answer."""
    parts = answer.split("```")
    return parts[-2].removeprefix("python") if len(parts) > 2 else answer


def reward_of(answer, tests):
    passed, has_crashed = [], True
    for test in tests:
        run = sandbox.run(code_of(answer), test["input"])
        if run.end in ("time", "cpu"):
            return -0.5
        has_crashed = has_crashed and not run.is_success
        # The expected output stays out here: code cannot print what it does not know.
        passed.append(run.is_success and run.output.decode(errors="replace").split() == test["output"].split())
    if has_crashed:
        return -1.0
    return 1.0 if all(passed) else 0.3 if any(passed) else 0.0


def reward_func(queries, prompts, labels):
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        try:
            rewards.append(reward_of(query[len(prompt) :], json.loads(label)))
        except RunError as error:
            print(f"the sandbox failed: {error}")
            rewards.append(None)  # not scored, which is no zero
    return {
        "rewards": rewards,
        "scores": [None if reward is None else (reward + 1.0) / 2.0 for reward in rewards],
        "extra_logs": {"code_correctness": rewards},
    }
