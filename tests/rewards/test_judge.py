"""A judge that answers, contradicts itself, writes nonsense and fails, over HTTP."""

import json
from concurrent.futures import Future
from pathlib import Path

import pytest
from reward_servers import WAIT_S, HeldPort, written

from hotseat.checks import reward_sources
from hotseat.checks.pipeline import check_user_code
from hotseat.checks.stage import CheckContext
from hotseat.config import Config, loads
from hotseat.config.conflicts import missing
from hotseat.errors import ConfigError, RunError, UserError
from hotseat.failed import Failed
from hotseat.loop.settings.rollout_settings import judge_of
from hotseat.rewards import Grader, Graders, Score
from hotseat.rewards.judge import Endpoints, Judge, VerdictFile, combined
from hotseat.rewards.rubrics import JudgeSettings

RUBRIC = "Question: {prompt}\nExpected: {label}\nAnswer: {answer}\nWrite `Score:` and 0 to 10."
PATTERN = loads("").reward.judge.pattern


@pytest.fixture
def judge(opened):
    """Makes judges at a server, which try again at once."""

    def make(server, **options) -> Judge:
        options = {"rubric": RUBRIC, "pattern": PATTERN, "timeout_s": WAIT_S, "retries": 0, **options}
        settings = JudgeSettings((server.judge_url,), "big", **options)
        opened.append(Judge(settings, Endpoints(settings, back_off_s=0.001, report=lambda line: None)))
        return opened[-1]

    return make


def submit(judge, answers=("4", "5"), labels=None) -> Future:
    labels = ["4"] * len(answers) if labels is None else labels
    ids = [f"0/0/{number}" for number in range(len(answers))]
    return judge.submit([f"2+2={answer}" for answer in answers], ["2+2="] * len(answers), labels, ids)


def scored(judge, *arguments) -> list[Score | Failed]:
    return submit(judge, *arguments).result(WAIT_S)


def text_of(message: dict) -> str:
    [only] = message["messages"]
    return only["content"]


# --- verdicts ---------------------------------------------------------------------------------------------------------


def test_each_answer_is_judged_by_the_rubric(server, judge):
    there = server(lambda number, message: written("Score: 10" if "Answer: 4" in text_of(message) else "Score: 2.5"))
    assert scored(judge(there, token="t0ken")) == [Score(1.0, 1.0), Score(0.25, 0.25)]
    assert {text_of(message) for message in there.messages} == {
        f"Question: 2+2=\nExpected: 4\nAnswer: {answer}\nWrite `Score:` and 0 to 10." for answer in "45"
    }
    assert all(
        (message["model"], message["temperature"], message["max_tokens"]) == ("big", 0.0, 1024)
        for message in there.messages
    )
    assert {headers["Authorization"] for headers in there.headers} == {"Bearer t0ken"}


def test_what_looks_like_a_place_in_an_answer_is_text(server, judge):
    there = server(lambda number, message: written("Score: 1"))
    scored(judge(there), ("{label} {prompt}",))
    assert "Answer: {label} {prompt}\n" in text_of(there.messages[0])


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>Score: 3, no</think> The answer is right.\n\n**Score: 7**", 0.7),
        ("Rating - 0", 0.0),
        ("verdict: 10.0/10", 1.0),
    ],
)
def test_the_last_verdict_counts(text, score, server, judge):
    assert scored(judge(server(lambda *_: written(text))), ("4",)) == [Score(score, score)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("I like it.", "the judge wrote no verdict that reward.judge.pattern finds: 'I like it.'"),
        ("", "the judge wrote nothing"),
        ("Score: 11", "the judge's verdict 11 is outside its scale, 0 to 10: 'Score: 11'"),
        ("Score: -1", "the judge's verdict -1 is outside its scale"),
    ],
)
def test_what_is_no_verdict_is_a_failed_sample_and_never_a_zero(text, reason, server, judge):
    [failed] = scored(judge(server(lambda *_: written(text))), ("4",))
    assert isinstance(failed, Failed)
    assert failed.reason.startswith(reason)
    assert failed.reason.endswith("(1 request; sample 0/0/0)")


def test_verdicts_may_be_words(server, judge):
    there = server(lambda number, message: written("**Yes**" if "Answer: 4" in text_of(message) else "No, never"))
    options = {"pattern": r"(?i)\b(yes|no|perhaps)\b", "choices": {"yes": 10.0, "no": 0.0}}
    assert scored(judge(there, **options)) == [Score(1.0, 1.0), Score(0.0, 0.0)]
    unsure = server(lambda *_: written("Perhaps."))
    [failed] = scored(judge(unsure, **options), ("4",))
    assert "the judge's verdict is 'Perhaps' instead of yes, no" in failed.reason


# --- votes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("combine", "score"), [("mean", 0.5), ("median", 0.6), ("majority", 0.1)])
def test_votes_are_combined(combine, score, server, judge):
    verdicts = {0: 1, 3: 6, 6: 8, 9: 9, 12: 1}  # by the seed of the request: three for each vote
    there = server(lambda number, message: written(f"Score: {verdicts[message['seed']]}"))
    found = scored(judge(there, votes=5, combine=combine, temperature=1.0), ("4",))
    assert found == [Score(pytest.approx(score), pytest.approx(score))]


def test_of_equally_frequent_verdicts_the_lowest_is_the_majority():
    assert combined([7.0, 3.0, 7.0, 3.0, 9.0], "majority") == 3.0


def test_a_vote_without_a_verdict_is_asked_for_again_and_then_fails_the_sample(server, judge):
    there = server(lambda number, message: written("Score: 4" if message["seed"] >= 2 else "Well."))
    assert scored(judge(there, temperature=1.0), ("4",)) == [Score(0.4, 0.4)]
    assert [message["seed"] for message in there.messages] == [0, 1, 2]
    mute = server(lambda *_: written("Well."))
    [failed] = scored(judge(mute, temperature=1.0), ("4",))
    assert "(3 requests; sample 0/0/0)" in failed.reason


# --- requests that were made before -----------------------------------------------------------------------------------


def test_equal_requests_are_made_once_and_verdicts_survive_the_judge(server, judge, tmp_path):
    there = server(lambda number, message: written("Score: 5"))
    cache = str(tmp_path / "judge.jsonl")
    first = judge(there, cache=cache)
    assert scored(first, ("4", "4", "5")) == [Score(0.5, 0.5)] * 3
    assert len(there.messages) == 2
    first.close()
    with open(cache, "a") as file:
        file.write('{"key": "cut sho')
    second = judge(there, cache=cache)
    assert scored(second, ("5", "4", "6")) == [Score(0.5, 0.5)] * 3
    assert len(there.messages) == 3
    second.close()
    *two, cut, third = Path(cache).read_text().splitlines()
    assert cut == '{"key": "cut sho'
    assert len([json.loads(line) for line in (*two, third)]) == 3
    assert scored(judge(there, cache=cache, rubric=RUBRIC + " Be strict."), ("4",)) == [Score(0.5, 0.5)]
    assert len(there.messages) == 4  # another rubric is another request


def test_what_failed_is_asked_again(server, judge, tmp_path):
    there = server(lambda number, message: written("Well." if number == 0 else "Score: 5"))
    one = judge(there, cache=str(tmp_path / "judge.jsonl"))
    assert isinstance(scored(one, ("4",))[0], Failed)
    assert scored(one, ("4",)) == [Score(0.5, 0.5)]


def test_without_a_file_verdicts_are_kept_in_memory():
    verdicts = VerdictFile(None)
    verdicts.add("k", 3.0, "Score: 3")
    assert (verdicts.get("k"), verdicts.get("l")) == (3.0, None)
    verdicts.close()


# --- endpoints that fail ----------------------------------------------------------------------------------------------


def test_a_broken_request_is_made_again(server, judge):
    there = server(lambda number, message: (500, "oh") if number < 2 else written("Score: 5"))
    assert scored(judge(there, retries=2), ("4",)) == [Score(0.5, 0.5)]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((500, "oh"), "status 500: oh (1 attempt)"),
        ((401, "who?"), "status 401: who?; the environment variable HOTSEAT_JUDGE_TOKEN holds the token to send"),
        ((404, "no model"), "status 404: no model"),
        ({"rewards": [1]}, "its answer has no list 'choices' with one entry"),
        (written(None), "its answer has no text at choices[0].message.content"),
    ],
)
def test_an_endpoint_that_fails_fails_the_sample_with_its_address(answer, reason, server, judge):
    there = server(lambda *_: answer)
    [failed] = scored(judge(there), ("4",))
    assert f"judge {there.judge_url}/chat/completions: {reason}" in failed.reason
    assert "sample 0/0/0" in failed.reason


@pytest.mark.parametrize("text", [None, "", "Score: 3 for style, but"])
def test_thoughts_without_an_end_are_no_verdict(text, server, judge):
    [failed] = scored(judge(server(lambda *_: written(text, "length"))), ("4",))
    assert "the judge wrote nothing, or was cut off before its end (reward.judge.max_tokens is" in failed.reason


def test_verdicts_of_several_hosts_share_a_file_and_a_line_that_is_not_whole_is_none(tmp_path):
    path = tmp_path / "judge.jsonl"
    one, other = VerdictFile(path), VerdictFile(path)
    one.add("a", 1.0, "Score: 1")
    other.add("b", 2.0, "Score: 2")
    with path.open("a") as file:
        file.write('{"key": "c", "verd')
    third = VerdictFile(path)
    one.add("d", 4.0, "Score: 4")
    third.add("e", 5.0, "Score: 5")
    again = VerdictFile(path)
    assert [again.get(key) for key in "abcde"] == [1.0, 2.0, None, 4.0, 5.0]
    for each in (one, other, third, again):
        each.close()


def test_a_token_that_a_refusal_quotes_is_in_no_reason(server, judge):
    there = server(lambda *_: (401, "Bearer s3cret-s3cret is unknown"))
    [failed] = scored(judge(there, token="s3cret-s3cret"), ("4",))
    assert "Bearer *** is unknown" in failed.reason


def test_a_missing_label_is_a_failed_sample_if_the_rubric_asks_for_it(server, judge):
    there = server(lambda *_: written("Score: 5"))
    [failed] = scored(judge(there), ("4",), [None])
    assert failed.reason == "the rubric has {label}, and the sample has none (sample 0/0/0)"
    assert scored(judge(there), ("4",), [""]) == [failed]
    assert scored(judge(there, rubric="{answer}"), ("4",), [None]) == [Score(0.5, 0.5)]


def test_a_label_that_is_no_string_is_in_the_rubric_as_json(server, judge):
    there = server(lambda *_: written("Score: 5"))
    scored(judge(there, rubric="{answer} is {label}"), ("4",), [{"a": ["é", 2]}])
    assert there.messages[0]["messages"][-1]["content"] == '4 is {"a": ["é", 2]}'


def test_what_is_open_when_the_judge_is_closed_says_so(server, judge):
    import asyncio

    one = judge(server(lambda *_: asyncio.Event().wait()))
    future = submit(one, ("4",))
    one.close()
    with pytest.raises(RunError, match="the client of judges was closed before sample 0/0/0 had an answer"):
        future.result(WAIT_S)
    with pytest.raises(RunError, match="the client of judges is closed"):
        submit(one, ("4",)).result(WAIT_S)


# --- beside graders ---------------------------------------------------------------------------------------------------


def test_its_verdict_is_added_as_a_graders_is(server, judge):
    there = server(lambda number, message: written("Score: 5" if "Answer: 4" in text_of(message) else "Hm."))
    with Graders([Grader("exact", "exact")], beside=[(Grader("judge", "taste", 0.5), judge(there))]) as graders:
        good, bad = scored(graders)
    assert good == Score(1.25, 1.25, {"exact": 1.0, "taste": 0.5})
    assert bad.reason.startswith("grader taste: the judge wrote no verdict")
    assert bad.reason.count("sample 0/0/1") == 1


# --- the config -------------------------------------------------------------------------------------------------------

BASE = "reward: {{judge: {{rubric: {rubric}, url: 'http://127.0.0.1:8000/v1', model: big{more}}}}}"


def config_of(tmp_path: Path, more: str = "", text: str = "{answer}"):
    (tmp_path / "rubric.txt").write_text(text)
    return loads(BASE.format(rubric=tmp_path / "rubric.txt", more=f", {more}" if more else ""))


def problems_of(config: Config) -> dict[str, str]:
    return {problem.key: problem.message for problem in reward_sources.judge(CheckContext(config=config))}


def test_settings_come_from_the_config(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTSEAT_JUDGE_TOKEN", "s3cret")
    config = config_of(tmp_path, r"votes: 3, pattern: '(?i)\b(yes|no)\b', choices: {'Yes': 10, 'No': 0}")
    found = judge_of(config, tmp_path)
    assert (found.urls, found.model, found.rubric) == (("http://127.0.0.1:8000/v1",), "big", "{answer}")
    assert (found.votes, found.temperature, found.token) == (3, 1.0, "s3cret")
    assert found.choices == {"yes": 10, "no": 0}
    assert found.cache == str(tmp_path / "judge.jsonl")
    assert "s3cret" not in repr(found)
    assert judge_of(loads(""), tmp_path) is None
    assert problems_of(config) == {}


def test_what_cannot_work_is_refused_before_anything_starts(tmp_path):
    def startup_problems(*arguments):
        return problems_of(config_of(tmp_path, *arguments))

    assert "has no {answer}" in startup_problems("", "Judge!")["reward.judge.rubric"]
    assert "is no regular expression" in startup_problems("pattern: '('")["reward.judge.pattern"]
    assert "has 0 groups: it needs one" in startup_problems("pattern: 'Score'")["reward.judge.pattern"]
    gone = loads(BASE.format(rubric=tmp_path / "gone.txt", more=""))
    assert "No such file" in problems_of(gone)["reward.judge.rubric"]
    (tmp_path / "rubric.txt").write_bytes(b"\xff\xfe{answer}")
    gone = loads(BASE.format(rubric=tmp_path / "rubric.txt", more=""))
    assert "no text in UTF-8" in problems_of(gone)["reward.judge.rubric"]


def test_an_address_with_a_query_is_refused(tmp_path):
    text = BASE.format(rubric=tmp_path / "rubric.txt", more="").replace("/v1", "/v1?version=1")
    with pytest.raises(ConfigError, match=r"reward.judge.url: has a query: give the address up to /v1"):
        loads(text)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("scale: [5, 5]", "reward.judge.scale: [5, 5]: the first has to be below"),
        ("choices: {good: 11}", "good is 11, outside of reward.judge.scale [0, 10]"),
        ("choices: {yes: 10}", "YAML reads yes, on or true as True: put the word in quotes"),
        ("choices: {}", "reward.judge.choices: no word in it"),
        ("choices: {'good': 10}", "reward.judge.pattern: not set, so it finds numbers"),
        ("votes: 3, temperature: 0", "reward.judge.temperature: 0: all 3 votes would be the same"),
        ("request: {stream: true}", "reward.judge.request: stream: set by the judge's other options"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(more, says, tmp_path):
    with pytest.raises(ConfigError) as error:
        config_of(tmp_path, more)
    assert says in str(error.value)


def test_names_and_sources_are_told_apart(tmp_path):
    for more, says in (
        ("graders: [{kind: exact, name: judge}]", "'judge' is taken: give the judge a name of its own"),
        ("model: rm", "cannot be added to reward.model, which scores alone"),
    ):
        with pytest.raises(ConfigError) as error:
            loads(f"reward: {{{more}, judge: {{rubric: r.txt, url: 'http://127.0.0.1:8000/v1', model: big}}}}")
        assert says in str(error.value)
    with pytest.raises(ConfigError) as error:
        loads("reward: {judge: {rubric: r.txt, url: 'http://me:pw@there/v1', model: big}}")
    assert "HOTSEAT_JUDGE_TOKEN" in str(error.value)
    assert "pw" not in str(error.value)


def test_a_judge_needs_a_model_with_or_without_an_endpoint():
    found = dict(missing(loads("reward: {judge: {rubric: r.txt}}")))
    assert found["reward.judge.model"] == "not set: give a checkpoint directory or a hub name"
    assert "reward.function" not in found  # it is a source of rewards
    elsewhere = dict(missing(loads("reward: {judge: {rubric: r.txt, url: 'http://127.0.0.1:8000/v1'}}")))
    assert elsewhere["reward.judge.model"] == "not set: give its name at the endpoint"
    assert "reward.judge.url" not in found


def test_an_endpoint_that_is_not_there_is_found_before_anything_heavy_starts(tmp_path, opened):
    opened.append(HeldPort())
    url = opened[-1].url.replace("get_reward", "v1")
    config = loads(f"reward: {{judge: {{rubric: r.txt, url: '{url}', model: big}}}}")
    with pytest.raises(UserError, match=r"no judge can be reached\n  reward.judge.url .*Connection refused"):
        check_user_code(config, lambda line: None)
