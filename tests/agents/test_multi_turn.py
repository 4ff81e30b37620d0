"""Single and multiple turns, with environments of our own."""

import math
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from agent_cases import KEY, SAMPLING, TOKENIZER, WAIT_S, Script, ids_of, marked, play, prompt_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hotseat.agents import AgentHost, Environment, MultiTurn, SingleTurn, Step, Transcript, load_agent
from hotseat.errors import UserError
from hotseat.types import Completion, Episode, Failed, Prompt, SampleKey, ScoredEpisode

EXAMPLE = Path(__file__).parents[2] / "examples" / "agents" / "guess_number.py"


def multi_turn(env_factory, max_length=100, max_steps=None) -> MultiTurn:
    return MultiTurn(env_factory, TOKENIZER, max_length=max_length, max_steps=max_steps)


class Countdown(Environment):
    """Done after three turns; each is worth its number."""

    def reset(self, prompt, label):
        self.turn = 0

    def step(self, action):
        self.turn += 1
        return Step(f"({self.turn})", reward=float(self.turn), done=self.turn == 3, extra={"turn": self.turn})


# --- single turn ------------------------------------------------------------------------------------------------------


def test_a_single_turn_is_what_the_engine_sampled():
    script = Script(["42<eos>"])
    episode = play(load_agent(None, TOKENIZER, max_length=100), script)
    assert isinstance(episode, Episode)
    assert marked(episode) == ["q:[42<eos>]"]
    assert (episode.key, episode.query, episode.is_truncated, episode.turn_lengths) == (KEY, "q:42<eos>", False, (3,))
    assert episode.segments[0].log_probs.tolist() == [0, 0, -0.5, -0.75, -1.0]
    (request,) = script.requests
    assert (request.token_ids, request.sampling, request.seed) == (ids_of("q:"), SAMPLING, KEY.seed(5, 0))


def test_an_answer_that_was_cut_is_truncated_and_one_that_ends_at_once_is_an_answer():
    assert play(SingleTurn(TOKENIZER), Script(["4|cut"])).is_truncated
    assert marked(play(SingleTurn(TOKENIZER), Script(["<eos>"]))) == ["q:[<eos>]"]


def test_text_reads_as_it_stands_behind_the_rest():
    words = {"what": 0, "is": 1, "it": 2}
    backend = Tokenizer(models.WordLevel(words, "it"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece("##", cleanup=False)  # puts a space between tokens, none in front
    transcript = Transcript(PreTrainedTokenizerFast(tokenizer_object=backend), Prompt(0, "what is", (0, 1)))
    assert transcript.add_sampled(Completion("x", (2, 2), (-1.0, -1.0), (0, 0), "stop")) == " it it"
    assert transcript.text == "what is it it"


def test_tokens_keep_the_experts_of_the_turn_that_processed_them_first():
    """Two turns with a word of the environment between them; the first answer was cut behind its second token."""
    transcript = Transcript(TOKENIZER, prompt_of("q:"))
    first, num = np.arange(8, dtype=np.uint8)[:, None], len(transcript.context)
    transcript.add_sampled(Completion("x", tuple(ids_of("ab")), (0.0, 0.0), (0, 0), "stop", routing=first))
    transcript.add_text("(1)")
    num_before = len(transcript.context)
    second = np.arange(100, 100 + num_before, dtype=np.uint8)[:, None]
    transcript.add_sampled(Completion("x", tuple(ids_of("c")), (0.0,), (0,), "stop", routing=second))
    transcript.add_text("(2)")
    [segment] = transcript.episode(KEY, is_truncated=False).segments
    known = num + 2 - 1
    expected = [*range(known), *range(100 + known, 100 + num_before), 255]
    assert segment.routing[:, 0].tolist() == expected
    transcript.start_again("new:")
    transcript.add_sampled(Completion("x", tuple(ids_of("d")), (0.0,), (0,), "stop"))
    assert transcript.episode(KEY, is_truncated=False).segments[1].routing is None


# --- several turns ----------------------------------------------------------------------------------------------------


def test_turns_follow_each_other_in_tokens_and_rewards_are_kept_per_turn():
    script = Script(["a<eos>", "bb", "c"])
    scored = play(multi_turn(Countdown), script)
    assert isinstance(scored, ScoredEpisode)
    assert marked(scored.episode) == ["q:[a<eos>](1)[bb](2)[c]"]
    assert scored.episode.query == "q:a<eos>(1)bb(2)c(3)"
    assert (scored.reward, scored.score, scored.turn_rewards, scored.extra) == (
        6.0,
        6.0,
        (1.0, 2.0, 3.0),
        {"turn": 3.0},
    )
    assert (scored.episode.turn_lengths, scored.episode.is_truncated) == ((2, 2, 1), False)
    assert script.contexts == ["q:", "q:a<eos>(1)", "q:a<eos>(1)bb(2)"]
    assert [request.seed for request in script.requests] == [KEY.seed(5, turn) for turn in range(3)]
    assert scored.episode.segments[0].versions.tolist() == [-1, -1, 0, 0, -1, -1, -1, 1, 1, -1, -1, -1, 2]


def test_turns_end_at_max_steps():
    scored = play(multi_turn(Countdown, max_steps=2), Script(["a", "b"]))
    assert marked(scored.episode) == ["q:[a](1)[b]"]
    assert scored.episode.is_truncated
    assert scored.reward == 3.0


def test_turns_end_where_the_context_is_full():
    script = Script(["aa", "b"])
    scored = play(multi_turn(Countdown, max_length=8), script)
    assert [request.sampling.max_new_tokens for request in script.requests] == [6, 1]
    assert marked(scored.episode) == ["q:[aa](1)[b]"]
    assert scored.episode.is_truncated


def test_an_answer_is_as_long_as_the_run_allows_at_most():
    script = Script(["a", "b", "c"])
    play(multi_turn(Countdown, max_length=1000), script)
    assert [request.sampling.max_new_tokens for request in script.requests] == [50, 50, 50]


def test_a_prompt_that_leaves_no_room_fails():
    failed = play(multi_turn(Countdown, max_length=2), Script([]))
    assert failed.reason == (
        "MultiTurn: sample 0/3/1: the first observation has 2 tokens and leaves none to sample within 2"
    )


def test_an_answer_that_was_cut_at_last_is_truncated_and_one_that_was_cut_earlier_is_not():
    assert play(multi_turn(Countdown), Script(["a", "b", "c|cut"])).episode.is_truncated
    assert not play(multi_turn(Countdown), Script(["a|cut", "b", "c"])).episode.is_truncated


def test_without_rewards_the_episode_is_left_to_the_reward_function():
    class NoReward(Environment):
        def step(self, action):
            return Step(done=True)

    assert isinstance(play(multi_turn(NoReward), Script(["a"])), Episode)


def test_a_turn_without_a_reward_beside_others_adds_none_and_the_last_score_counts():
    class WorkerTimeout(Countdown):
        def step(self, action):
            step = super().step(action)
            return Step("+", 7.0, True, score=0.5) if step.done else Step("+")

    scored = play(multi_turn(WorkerTimeout), Script(["a", "b", "c"]))
    assert (scored.reward, scored.score, scored.turn_rewards) == (7.0, 0.5, (0.0, 0.0, 7.0))


@pytest.mark.parametrize(
    ("observation", "expected"),
    [(None, "q:[a]"), ("q:", "q:[a]"), ("q: more", "q: more[a]"), ("other", "other[a]")],
)
def test_the_first_observation(observation, expected):
    class Begins(Environment):
        def reset(self, prompt, label):
            assert (prompt, label) == ("q:", "7")
            return observation

        def step(self, action):
            return Step(done=True, reward=1.0)

    scored = play(multi_turn(Begins), Script(["a"]), label="7")
    assert marked(scored.episode) == [expected]
    assert scored.episode.query == expected.replace("[", "").replace("]", "")


@pytest.mark.parametrize("label", [7, ["a", None], {"a": 1.5}, True, ""])
def test_an_environment_gets_the_label_as_it_is(label):
    seen = []

    class Sees(Environment):
        def reset(self, prompt, label):
            seen.append(label)

        def step(self, action):
            return Step(done=True, reward=1.0)

    play(multi_turn(Sees), Script(["a"]), label=label)
    assert seen == [label]
    assert type(seen[0]) is type(label)
    assert Prompt(0, "q", (1,)).label == ""  # what a run without data.label_key has


def test_plain_methods_run_in_one_thread_of_the_episode_and_async_ones_in_the_loop():
    threads = []

    class Mixed(Environment):
        def __init__(self):
            threads.append(threading.current_thread())

        async def reset(self, prompt, label):
            assert threading.current_thread() is not threads[0]

        def step(self, action):
            threads.append(threading.current_thread())
            return Step(done=True, reward=0.0)

        def close(self):
            threads.append(threading.current_thread())

    assert isinstance(play(multi_turn(Mixed), Script(["a"])), ScoredEpisode)
    assert len(threads) == 3
    assert len(set(threads)) == 1


def test_an_environment_is_closed_after_a_failure_too(caplog):
    closed = []

    class Fails(Environment):
        def step(self, action):
            raise KeyError("no such door")

        async def close(self):
            closed.append(True)
            raise OSError("already closed")

    failed = play(multi_turn(Fails), Script(["a"]))
    assert closed == [True]
    assert "already closed" in caplog.text
    assert "the agent raised KeyError: 'no such door'" in failed.reason
    assert "test_multi_turn.py:" in failed.reason


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (None, "step returned a NoneType, not a Step"),
        (Step(feedback=3), "step returned feedback that is a int, not a string"),
        (Step(reward=math.nan), "reward is nan"),
        (Step(reward="1"), "reward is a str, not one number"),
        (Step(reward=[1, 2]), "reward is a list of 2, not one number"),
        (Step(score=math.inf), "score is inf"),
        (Step(extra={"x": "y"}), "extra['x'] is a str, not one number"),
    ],
)
def test_steps_that_cannot_be(step, reason):
    class Wrong(Environment):
        def step(self, action):
            return step

    failed = play(multi_turn(Wrong), Script(["a"]))
    assert isinstance(failed, Failed)
    assert failed.reason.endswith(reason)


def test_environments_that_cannot_be():
    class Empty(Environment):
        pass

    class Resets(Environment):
        def reset(self, prompt, label):
            return 3

    class Exits(Environment):
        def step(self, action):
            raise SystemExit(1)

    assert "NotImplementedError: Empty.step" in play(multi_turn(Empty), Script(["a"])).reason
    assert "reset returned a int, neither a string nor None" in play(multi_turn(Resets), Script(["a"])).reason
    assert "RuntimeError: SystemExit: 1" in play(multi_turn(Exits), Script(["a"])).reason


def test_a_blocking_step_holds_up_nobody_else():
    go_on = threading.Event()

    class Blocks(Environment):
        def reset(self, prompt, label):
            self.blocks = label == "block"

        def step(self, action):
            if self.blocks:
                go_on.wait(WAIT_S)
            return Step(done=True, reward=1.0)

    with AgentHost(multi_turn(Blocks), Script(lambda request: "a"), run_seed=0) as host:
        slow = host.submit(prompt_of("q", "block"), SampleKey(0, 0, 0), SAMPLING)
        fast = [host.submit(prompt_of("q", ""), SampleKey(0, 1, at), SAMPLING) for at in range(20)]
        assert all(future.result(WAIT_S).reward == 1.0 for future in fast)
        assert not slow.done()
        go_on.set()
        assert slow.result(WAIT_S).reward == 1.0


# --- files ------------------------------------------------------------------------------------------------------------


def test_the_example_can_be_played():
    agent = load_agent(EXAMPLE, TOKENIZER, max_length=200, max_steps=4)
    scored = play(agent, Script(["50", "what?", "75<eos>"]), "Guess: ", label="75")
    (text,) = marked(scored.episode)
    assert text == "Guess: [50]\nIt is higher. Guess: [what?]\nThat is no number. Guess: [75<eos>]"
    assert scored.turn_rewards == (0.0, -0.1, 1.0)
    assert (scored.score, scored.extra) == (1.0, {"num_guesses": 3.0})
    lost = play(agent, Script(["1"] * 4), "Guess: ", label="75")
    assert (lost.reward, lost.score, lost.episode.is_truncated) == (0.0, 0.0, True)


AGENT = """
from hotseat.agents import Agent, Transcript

class Twice(Agent):
    def __init__(self, tokenizer, max_length):
        self.tokenizer = tokenizer

    async def run(self, prompt, key, sampling, sample):
        transcript = Transcript(self.tokenizer, prompt)
        for turn in range(2):
            transcript.add_sampled(await sample(transcript.context, sampling, turn))
        transcript.start_again("new:")
        transcript.add_sampled(await sample(transcript.context, sampling, 2))
        return transcript.episode(key, is_truncated=False)
"""


def write(tmp_path, text: str) -> Path:
    (tmp_path / "agent_file.py").write_text(text)
    return tmp_path / "agent_file.py"


def test_an_agent_of_ones_own(tmp_path):
    episode = play(load_agent(write(tmp_path, AGENT), TOKENIZER, max_length=100), Script(["a", "b", "c"]))
    assert marked(episode) == ["q:[ab]", "new:[c]"]
    assert (episode.turn_lengths, episode.query) == ((1, 1, 1), "new:c")


def test_one_of_several_classes_is_named(tmp_path):
    file = write(tmp_path, AGENT + "class Other(Twice): pass\n")
    with pytest.raises(UserError, match=r"has several agents or environments: name one, as agent_file.py:Other"):
        load_agent(file, TOKENIZER, max_length=100)
    assert type(load_agent(f"{file}:Twice", TOKENIZER, max_length=100)).__name__ == "Twice"
    with pytest.raises(UserError, match="no agent or environment 'Third' in it; it has: Twice, Other"):
        load_agent(f"{file}:Third", TOKENIZER, max_length=100)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", r"no agent in it; what would fit: a subclass of hotseat.Environment"),
        ("x = \n", "not Python: invalid syntax at line 1"),
        ("\0", "not Python"),
        ("x = 1\nraise KeyError('x')\n", "agent_file.py: KeyError: 'x' at line 2"),
        ("import sys\nsys.exit(1)\n", "SystemExit: 1 at line 2"),
        (
            "from hotseat.agents import Agent\nclass A(Agent):\n    def __init__(self, url): pass\n",
            "A cannot be made: UserError: A.__init__ requires 'url'; it can be given: tokenizer, max_length, max_steps",
        ),
        (
            "from hotseat.agents import Agent\nclass A(Agent):\n    def __init__(self): raise OSError('x')\n",
            "A cannot be made: OSError: x at line 3",
        ),
    ],
)
def test_files_that_cannot_be_used(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        load_agent(write(tmp_path, text), TOKENIZER, max_length=100)


def test_a_file_that_does_not_exist(tmp_path):
    with pytest.raises(UserError, match=r"agent: .*nothing.py: No such file or directory"):
        load_agent(tmp_path / "nothing.py", TOKENIZER, max_length=100)


def test_loading_is_cheap_and_leaves_no_module_behind(tmp_path):
    file = write(tmp_path, "from hotseat.agents import Environment\nclass Mine(Environment): pass\n")
    before = set(sys.modules)

    def seconds() -> float:
        begin = time.perf_counter()
        for _ in range(20):
            load_agent(file, TOKENIZER, max_length=100)
        return time.perf_counter() - begin

    assert min(seconds() for _ in range(3)) < 1.0  # once undisturbed
    assert set(sys.modules) == before
