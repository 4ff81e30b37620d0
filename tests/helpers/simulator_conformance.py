"""The contract of a batch of simulators, for any family: `check(make)`; `make(num_envs)` returns a `ProcessEnv`."""

from collections.abc import Callable

import numpy as np

from hotseat.envs.processes import ProcessEnv, _digest

CHUNK = 3
NUM_CHUNKS = 4


def check(make: Callable[[int], ProcessEnv]) -> None:
    """Run the whole suite."""
    with _closing(make(4)) as four, _closing(make(2)) as two:
        describes_itself(four)
        a_slot_depends_on_itself_alone(four, two)
        nothing_acts_after_the_end(four)
        a_slot_is_reset_while_others_go_on(four)
        snapshots_continue(four, two)
        offloads_and_comes_back(four)
        is_drawn(four)


def describes_itself(env: ProcessEnv) -> None:
    assert env.num_envs == 4
    assert [task.index for task in env.tasks] == list(range(len(env.tasks)))
    assert len(env.action.low) == len(env.action.high) == env.action.dim > 0
    assert env.action.num_values is None or env.action.dim == 1
    [seen] = env.reset([0], [0], [1])
    assert seen.text or seen.state is not None or seen.image is not None
    if seen.state is not None:
        low, high = env.state_bounds
        assert seen.state.shape == low.shape == high.shape
        assert seen.state.dtype == np.float32
    if seen.image is not None:
        assert seen.image.dtype == np.uint8
        assert seen.image.ndim == 3


def a_slot_depends_on_itself_alone(four: ProcessEnv, two: ProcessEnv) -> None:
    """Whatever slot, whatever is beside it, and in whatever order: the same task, seed and actions, the same bits."""
    last = len(four.tasks) - 1
    alone = [played(two, 0, 0, 5), played(two, 1, last, 6)]
    assert alone[0] != played(two, 0, 0, 7), "the seed changes nothing"
    seen = four.reset([3, 1, 0], [0, last, 0], [5, 6, 8])
    together = {3: [_digest(seen[0])], 1: [_digest(seen[1])]}
    for chunk in range(NUM_CHUNKS):
        order = [1, 3, 0] if chunk % 2 else [0, 3, 1]
        seeds = {3: 5, 1: 6, 0: 8}
        outcome = four.step(order, np.stack([actions_of(four, seeds[slot], chunk) for slot in order]))
        for row, slot in enumerate(order):
            if slot in together:
                together[slot].append(row_digest(outcome, row))
        if (outcome.terminated | outcome.truncated).any():
            break
    for expected, slot in zip(alone, (3, 1), strict=True):
        length = min(len(expected), len(together[slot]))
        assert length > 1
        assert together[slot][:length] == expected[:length]


def nothing_acts_after_the_end(env: ProcessEnv) -> None:
    """Play until episodes end: rewards after the end of a chunk are 0, and the number of actions says where it was."""
    env.reset([0, 1], [0, 0], [11, 12])
    open_slots = [0, 1]
    for chunk in range(200):
        outcome = env.step(open_slots, np.stack([actions_of(env, slot, chunk) for slot in open_slots]))
        ended = outcome.terminated | outcome.truncated
        assert not outcome.failures
        assert not (outcome.terminated & outcome.truncated).any()
        for row in range(len(open_slots)):
            assert 1 <= outcome.num_taken[row] <= CHUNK
            assert ended[row] or outcome.num_taken[row] == CHUNK
            assert not outcome.rewards[row, outcome.num_taken[row] :].any()
        assert not (outcome.success & ~ended).any()
        open_slots = [slot for row, slot in enumerate(open_slots) if not ended[row]]
        if not open_slots:
            return
    raise AssertionError("no episode ended within 600 actions: give the simulator a limit")


def a_slot_is_reset_while_others_go_on(env: ProcessEnv) -> None:
    env.reset([0, 1], [0, 0], [21, 22])
    env.step([0, 1], np.stack([actions_of(env, seed, 0) for seed in (21, 22)]))
    [again] = env.reset([0], [0], [21])
    [first] = env.reset([2], [0], [21])
    assert _digest(again) == _digest(first)
    other = env.step([1], actions_of(env, 22, 1)[None])
    assert row_digest(other, 0) == played(env, 3, 0, 22)[2]


def snapshots_continue(env: ProcessEnv, other: ProcessEnv) -> None:
    env.reset([0, 1], [0, 0], [31, 32])
    env.step([0, 1], np.stack([actions_of(env, seed, 0) for seed in (31, 32)]))
    if hasattr(env, "forget"):
        env.forget([2, 3])
    state = env.snapshot()
    expected = env.step([0, 1], np.stack([actions_of(env, seed, 1) for seed in (31, 32)]))
    other.restore(state)
    restored = other.step([0, 1], np.stack([actions_of(env, seed, 1) for seed in (31, 32)]))
    assert [row_digest(restored, row) for row in (0, 1)] == [row_digest(expected, row) for row in (0, 1)]


def offloads_and_comes_back(env: ProcessEnv) -> None:
    before = played(env, 0, 0, 41)
    assert env.offload().num_bytes >= 0
    assert env.onload().num_bytes >= 0
    assert played(env, 0, 0, 41) == before


def is_drawn(env: ProcessEnv) -> None:
    env.reset([0], [0], [51])
    [picture] = env.render([0])
    assert picture.dtype == np.uint8
    assert picture.ndim == 3
    assert picture.shape[2] == 3


def played(env: ProcessEnv, slot: int, task: int, seed: int) -> list[bytes]:
    """Play an episode by fixed actions, and return digests of what was seen."""
    digests = [_digest(env.reset([slot], [task], [seed])[0])]
    for chunk in range(NUM_CHUNKS):
        outcome = env.step([slot], actions_of(env, seed, chunk)[None])
        digests.append(row_digest(outcome, 0))
        if outcome.terminated[0] or outcome.truncated[0]:
            break
    return digests


def actions_of(env: ProcessEnv, seed: int, chunk: int) -> np.ndarray:
    """Return a chunk of actions, [K, D], that depends on the seed and the chunk."""
    random = np.random.default_rng([seed, chunk])
    if env.action.num_values is not None:
        return random.integers(0, env.action.num_values, (CHUNK, 1)).astype(np.float64)
    return random.uniform(env.action.low, env.action.high, (CHUNK, env.action.dim))


def row_digest(outcome, row: int) -> bytes:
    flags = [bool(each[row]) for each in (outcome.terminated, outcome.truncated, outcome.success)]
    return _digest((outcome.seen[row], outcome.rewards[row], int(outcome.num_taken[row]), flags))


class _closing:
    def __init__(self, env: ProcessEnv):
        self._env = env

    def __enter__(self) -> ProcessEnv:
        return self._env

    def __exit__(self, *_: object) -> None:
        self._env.close()
