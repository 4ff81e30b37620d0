"""Records of a run: samples with facts for each token, distributions, the timeline."""

import itertools
import json
import pickle
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from loop_cases import make_task, rl_yaml
from transformers import AutoTokenizer

from hotseat.config import loads
from hotseat.loop.rl.ledger import read_ledger
from hotseat.loop.rl.sample_log import ChosenSample, written
from hotseat.loop.run import start
from hotseat.loop.workers.experience import Share
from hotseat.loop.workers.records import record_of, token_texts
from hotseat.observe import read_lines, read_timeline
from hotseat.types import (
    Episode,
    EpisodeFacts,
    Prompt,
    PromptGroup,
    SampleKey,
    ScoredEpisode,
    Segment,
    TurnFacts,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Make a run with two optimizer steps per rollout, a tight clip, and filtered prompts."""
    task = make_task(tmp_path_factory.mktemp("records"))
    options = [
        "train.num_episodes=4",
        "train.batch_size=8",
        "algorithm.clip_low=0.01",
        "algorithm.clip_high=0.01",
        "algorithm.filtering.enabled=true",
        "algorithm.filtering.low=0.3",
        "algorithm.filtering.high=10",
        "log.samples_every=2",
        "log.samples_per_step=4",
    ]
    start(loads(rl_yaml(task, eval=f"{{path: {task}/prompts.jsonl}}"), options))
    return task / "runs" / "run"


def tokens_of(line: dict) -> list[dict]:
    """Return the sampled tokens of a sample, as one dict each."""
    keys = ("text", "sampled", "engine_log_probs", "trainer_log_probs", "advantages", "fates", "versions")
    rows = [
        dict(zip(keys, row, strict=True))
        for segment in line["segments"]
        for row in zip(*(segment[key] for key in keys), strict=True)
    ]
    assert all(row["engine_log_probs"] is None for row in rows if not row["sampled"])
    return [row for row in rows if row["sampled"]]


def test_samples_of_the_first_step_and_of_every_second_one_are_recorded(run_dir):
    lines = read_lines(run_dir / "samples.jsonl")
    steps = {line["step"] for line in lines}
    assert steps >= {1, 2}
    assert all(step == 1 or step % 2 == 0 for step in steps)
    assert len([line for line in lines if line["step"] == 1 and line["state"] == "trained"]) == 4


def test_a_recorded_sample_agrees_with_the_ledger_and_with_itself(run_dir):
    lines = read_lines(run_dir / "samples.jsonl")
    fates = {(key.epoch, key.prompt, key.sample): entry for entry in read_ledger(run_dir) for key in entry.keys}
    assert {line["state"] for line in lines} == {"trained", "dropped"}
    for line in lines:
        entry = fates[line["epoch"], line["prompt"], line["sample"]]
        assert (line["state"], line["reason"], line["step"]) == (entry.state, entry.reason, entry.step)
        tokens = tokens_of(line)
        assert 1 <= len(tokens) <= 4
        assert {token["versions"] for token in tokens} == {entry.version}
        text = "".join(token["text"] for token in tokens)
        assert line["reward"] == text.count("7")
        assert "".join(line["segments"][0]["text"]).startswith(line["prompt_text"])


def test_engine_and_trainer_agree_on_recorded_tokens_before_the_update(run_dir):
    gaps = [
        abs(token["engine_log_probs"] - token["trainer_log_probs"])
        for line in read_lines(run_dir / "samples.jsonl")
        if line["state"] == "trained"
        for token in tokens_of(line)
    ]
    assert gaps
    assert max(gaps) < 1e-4


def test_fates_of_tokens_add_up_to_the_metrics(run_dir):
    lines = [line for line in read_lines(run_dir / "samples.jsonl") if line["state"] == "trained"]
    fates = {token["fates"] for line in lines for token in tokens_of(line)}
    assert fates <= {"learned", "clipped", "no gradient"}
    assert "clipped" in fates  # the second optimizer step of a rollout has moved away, and the clip is tight
    for line in lines:
        for token in tokens_of(line):
            assert (token["fates"] == "no gradient") <= (token["advantages"] == 0)


def test_dropped_samples_have_no_numbers_of_the_trainer(run_dir):
    for line in read_lines(run_dir / "samples.jsonl"):
        if line["state"] == "dropped":
            assert line["reason"] in ("score too low", "score too high")
            assert all(token["trainer_log_probs"] is None and token["fates"] is None for token in tokens_of(line))


def test_distributions_count_every_sample(run_dir):
    metrics = {record["step"]: record for record in read_lines(run_dir / "metrics.jsonl")}
    records = read_lines(run_dir / "distributions.jsonl")
    assert [record["step"] for record in records] == [step for step in metrics if step > 0]
    for record in records:
        of_step = metrics[record["step"]]
        assert sum(count for _, count in record["reward"]) == of_step["samples"]
        assert sum(value * count for value, count in record["length"]) == of_step["sampled_tokens"]


def test_recording_changes_no_number(tmp_path):
    """The same run with and without: what is only written down must not be felt."""
    task = make_task(tmp_path)
    for name, *log in (("much", "log.samples_per_step=16", "log.samples_every=1"), ("none", "log.samples_per_step=0")):
        start(loads(rl_yaml(task, name=name), log))
    much, none = ((task / "runs" / name / "model" / "model.safetensors").read_bytes() for name in ("much", "none"))
    assert much == none
    assert (task / "runs" / "none" / "samples.jsonl").read_text() == ""


def test_the_timeline_shows_phases_devices_and_calls(run_dir):
    events = list(read_timeline(run_dir / "timeline.json"))
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    spans = [(names[event["pid"]], event) for event in events if event["ph"] == "X"]
    phases = [event["name"] for process, event in spans if process == "phases"]
    assert set(phases) >= {"rollout", "prepare", "update", "sync", "evaluate", "export"}
    assert {event["name"] for process, event in spans if process == "devices"} >= {"actor", "rollout"}
    assert {event["name"] for process, event in spans if process == "actor"} >= {"prepare", "update", "begin_push"}
    assert all(event["dur"] >= 0 and event["ts"] > 1.6e15 for _, event in spans)
    # Phases follow one another and do not overlap.
    times = sorted((event["ts"], event["ts"] + event["dur"]) for process, event in spans if process == "phases")
    assert all(end <= start + 1000 for (_, end), (start, _) in itertools.pairwise(times))


def test_the_timeline_is_json_once_its_bracket_is_closed(run_dir):
    text = (run_dir / "timeline.json").read_text()
    assert json.loads(text.rstrip().rstrip(",") + "]")


def test_texts_of_tokens_join_to_the_whole(run_dir):
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "model")
    ids = tokenizer("12+34=46")["input_ids"]
    assert "".join(token_texts(ids, tokenizer)) == tokenizer.decode(ids)


def test_phases_belong_to_their_steps(run_dir):
    events = list(read_timeline(run_dir / "timeline.json"))
    [pid] = {event["pid"] for event in events if event.get("args") == {"name": "phases"}}
    phases = [event for event in events if event["ph"] == "X" and event["pid"] == pid]
    steps = [(event["name"], event["args"]["step"]) for event in phases]
    assert steps[:2] == [("sync", 0), ("evaluate", 0)]
    assert steps[2:6] == [("rollout", 1), ("prepare", 1), ("update", 1), ("sync", 1)]
    last = max(step for _, step in steps)
    assert steps[-1] == ("export", last)
    assert last == read_lines(run_dir / "metrics.jsonl")[-1]["step"]


def test_phases_of_a_step_are_no_longer_than_the_step(run_dir):
    for record in read_lines(run_dir / "metrics.jsonl"):
        if "step_s" in record:
            phases = sum(record[f"time/{phase}"] for phase in ("rollout", "prepare", "update", "sync"))
            assert phases <= 1.001 * record["step_s"]


def test_a_config_in_a_report_has_no_secrets(run_dir, tmp_path):
    from hotseat.observe.report import write_report

    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    with (copy / "config.yaml").open("a") as file:
        file.write("cluster:\n  node_groups:\n  - env_vars: {TOKEN: hush-hush}\n")
    assert "hush-hush" not in write_report([copy], copy / "report.html").read_text()


def test_samples_of_a_skipped_update_are_recorded_as_skipped(tmp_path, monkeypatch):
    """Scenario 32: what is recorded of it says so."""
    from hotseat.loop.workers import losses

    terms = losses.PolicyObjective.terms

    def broken(self, outputs, batch):
        found = terms(self, outputs, batch)
        return replace(found, loss=found.loss * float("nan"))

    monkeypatch.setattr(losses.PolicyObjective, "terms", broken)
    task = make_task(tmp_path)
    start(loads(rl_yaml(task)))
    lines = read_lines(task / "runs" / "run" / "samples.jsonl")
    assert {token["fates"] for line in lines for token in tokens_of(line)} <= {"skipped", "no gradient"}
    assert "skipped" in {token["fates"] for line in lines for token in tokens_of(line)}


def test_a_sample_is_recorded_with_its_turns_and_times_also_after_it_was_pickled():
    segment = Segment(torch.tensor([3, 4, 5]), torch.tensor([False, True, True]), torch.zeros(3), torch.zeros(3))
    facts = EpisodeFacts((TurnFacts(0.5, 1.0, ("add(1)",)), TurnFacts(2.0, 2.25)), waited_s=0.125, took_s=3.0)
    episode = Episode(SampleKey(0, 1, 2), (segment,), "query", turn_lengths=(1, 1), facts=facts)
    prompt = Prompt(1, "q", (3,))
    share = Share((PromptGroup(prompt, (ScoredEpisode(episode, 1.0, 1.0, {}, (0.25, 0.75)),)),), ((0,),))
    [sample] = pickle.loads(pickle.dumps(share)).groups[0].samples
    record = record_of(sample, prompt, SimpleNamespace(decode=lambda ids: "".join(map(str, ids))))
    line = written(7, ChosenSample(sample.episode.key, "trained", ""), record, None)
    assert (line["waited_s"], line["took_s"]) == (0.125, 3.0)
    assert line["turns"][0] == {
        "length": 1,
        "reward": 0.25,
        "asked_s": 0.5,
        "answered_s": 1.0,
        "tool_calls": ["add(1)"],
    }
    assert line["turns"][1] == {"length": 1, "reward": 0.75, "asked_s": 2.0, "answered_s": 2.25, "tool_calls": []}
