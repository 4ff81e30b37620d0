"""More prompts than a step needs: the groups that are complete first are learned, the others end and are recorded."""

from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
from loop_cases import make_task, rl_yaml, same, weights
from stopped_runs import stopped_after_saving

from hotseat.cli.main import main
from hotseat.config import loads
from hotseat.data.order import PromptOrder
from hotseat.errors import ConfigError
from hotseat.loop.rl.collect import given_up_metrics
from hotseat.loop.rl.groups import shares_of
from hotseat.loop.rl.ledger import GIVEN_UP, read_ledger
from hotseat.loop.rl.recovery import HOST
from hotseat.loop.rl.stream import SynchronousStream
from hotseat.loop.run import start
from hotseat.loop.workers.group_facts import GivenUp, GroupFacts
from hotseat.observe import read_lines
from hotseat.types import Prompt

# The first two prompts never end: one sample waits for ever, another one asks the engine without end. The other prompts
# begin when what ends of the first two has ended, so the answers that are cut are always the same.
AGENT = """
import asyncio
from collections import Counter, defaultdict
from hotseat.agents import Agent, SingleTurn

ENDED = Counter()
ALL_ENDED = defaultdict(asyncio.Event)


class Stuck(Agent):
    def __init__(self, tokenizer):
        self.inner = SingleTurn(tokenizer)

    async def run(self, prompt, key, sampling, sample):
        if prompt.index >= 2:
            await ALL_ENDED[key.epoch].wait()
        episode = await self.inner.run(prompt, key, sampling, sample)
        if prompt.index < 2 and key.sample < 2:
            ENDED[key.epoch] += 1
            if ENDED[key.epoch] == 4:
                ALL_ENDED[key.epoch].set()
        if prompt.index < 2 and key.sample == 3:
            await asyncio.Event().wait()
        turn = 0
        while prompt.index < 2 and key.sample == 2:
            turn += 1
            await sample(list(prompt.token_ids), sampling, turn)
        return episode
"""


def config(task, name: str, **changes: str):
    (task / "agent.py").write_text(AGENT)
    sections = {
        "agent": f"{{path: '{task}/agent.py:Stuck', max_concurrent: 24}}",
        "data": f"{{path: {task}/prompts.jsonl, label_key: label, max_length: 16, max_samples: 6}}",
        "rollout": "{batch_size: 4, samples_per_prompt: 4, max_new_tokens: 4, num_slots: 8, oversample: 0.5}",
        "train": "{dtype: fp32, batch_size: 16, micro_batch_size: 8, num_episodes: 2}",
    } | changes
    return loads(rl_yaml(task, name=name, **sections))


def fates(task, name: str) -> list[tuple]:
    entries = read_ledger(task / "runs" / name)
    return [(each.step, each.epoch, each.prompt, each.samples, each.state, each.reason) for each in entries]


@pytest.mark.slow
def test_the_first_complete_groups_are_learned_and_no_sample_is_lost_or_doubled_by_a_resume(tmp_path):
    task = make_task(tmp_path)
    start(config(task, "whole"))
    entries = list(read_ledger(task / "runs" / "whole"))
    keys = Counter(str(key) for entry in entries for key in entry.keys)
    assert set(keys.values()) == {1}
    # Each step takes all six prompts of a pass, of which the first two are never complete.
    trained = sorted((each.step, each.epoch, each.prompt) for each in entries if each.state == "trained")
    assert trained == [(step, step - 1, prompt) for step in (1, 2, 3) for prompt in (2, 3, 4, 5)]
    dropped = sorted((each.step, each.epoch, each.prompt) for each in entries if each.state == "dropped")
    assert dropped == [(step, step - 1, prompt) for step in (1, 2, 3) for prompt in (0, 1)]
    assert {each.reason for each in entries if each.state == "dropped"} == {GIVEN_UP}
    assert len(keys) == 3 * 6 * 4
    records = [line for line in read_lines(task / "runs" / "whole" / "metrics.jsonl") if line.get("step")]
    assert [line["groups_given_up"] for line in records] == [2.0] * 3
    assert [line["answers_cut"] for line in records] == [4.0] * 3
    assert all(1 <= line["length_given_up"] <= 4 for line in records)

    with stopped_after_saving(2):
        start(config(task, "broken", checkpoint="{every: 1}"))
    assert main(["resume", str(task / "runs" / "broken")]) == 0
    assert fates(task, "broken") == fates(task, "whole")
    assert same(weights(task, "whole"), weights(task, "broken"))


def _facts(key: tuple[int, int], reward: float) -> GroupFacts:
    twice = (reward, 1 - reward)
    return GroupFacts(*key, "", (0, 1), twice, twice, (1, 1), (2, 2), (False, False), ())


def test_groups_that_a_host_lost_are_sampled_again_and_time_does_not_choose_others():
    """The second time other groups would be complete first."""
    asked: list[tuple[list, int | None]] = []
    forgotten: list[tuple[int, int]] = []

    def answer(jobs, sampling, num_needed=None):
        asked.append(([job.key for job in jobs], num_needed))
        chosen = jobs if num_needed is None else jobs[-num_needed:] if len(asked) == 1 else jobs[:num_needed]
        return [_facts(job.key, 1.0) for job in chosen]

    restarts: Counter[str] = Counter()
    known = [GivenUp(0, 0, 2, (3,))]
    runner = SimpleNamespace(
        answer=answer,
        settings=SimpleNamespace(config=loads("rollout: {batch_size: 2, samples_per_prompt: 2, oversample: 0.5}")),
        recovery=SimpleNamespace(during=lambda work: work(), restarts=restarts, start_counting=lambda: None),
        groups=SimpleNamespace(hosts=SimpleNamespace(given_up=lambda: known, forget=forgotten.extend)),
    )
    state = SimpleNamespace(order=PromptOrder(6, 0, is_shuffled=False))
    prompts = [Prompt(index, "1+2=", (3, 4)) for index in range(6)]
    record = SimpleNamespace(taken=lambda step, batch: None)
    stream = SynchronousStream(runner, state, SimpleNamespace(), prompts, record)
    batch = stream.take(1)
    assert [facts.key for facts in batch.groups] == [(0, 1), (0, 2)]
    assert batch.given_up == (known[0],)
    restarts[HOST] += 1
    again, result = stream.with_groups(batch, lambda each: [facts.key for facts in each.groups])
    assert result == [(0, 1), (0, 2)]
    assert again.given_up == batch.given_up
    assert asked == [([(0, 0), (0, 1), (0, 2)], 2), ([(0, 1), (0, 2)], None)]
    stream.release(again)
    assert forgotten == [(0, 1), (0, 2), (0, 0)]
    assert stream.take(2).groups[0].key == (0, 3)


def test_hosts_share_what_is_needed_by_their_jobs():
    assert shares_of(4, [3, 3]) == [2, 2]
    assert shares_of(5, [3, 2, 2]) == [2, 1, 2]
    assert sum(shares_of(128, [50, 51, 91])) == 128
    assert all(part <= size for part, size in zip(shares_of(9, [4, 4, 4]), [4, 4, 4], strict=True))


def test_the_lengths_of_what_was_given_up_are_measured():
    given_up = [GivenUp(0, 1, 4, (10, 30)), GivenUp(0, 2, 4)]
    assert given_up_metrics(given_up) == {"groups_given_up": 2.0, "answers_cut": 6.0, "length_given_up": 20.0}
    assert given_up_metrics([]) == {}


def test_where_more_prompts_would_mean_nothing_they_are_refused():
    refused = partial(pytest.raises, ConfigError)
    with refused(match="overlap.order arrival takes the groups that are finished first, and loses none"):
        loads("overlap: {staleness: 1}\nrollout: {oversample: 0.5}")
    with refused(match=r"rollout.oversample: has no effect: env.path is set"):
        loads("env: {path: gym}\nrollout: {oversample: 0.5}")
