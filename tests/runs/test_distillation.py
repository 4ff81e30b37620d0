"""Runs in which a policy learns from a teacher's distributions, on answers that it samples."""

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loop_cases import make_group, make_segment, make_task, rl_yaml, same, weights, write_rows
from safetensors.torch import load_file, save_file
from stopped_runs import stopped_after_saving

from hotseat.algorithms.distillation import Divergence
from hotseat.config import loads
from hotseat.errors import ConfigError, UserError
from hotseat.loop.run import start
from hotseat.loop.workers.by_sample import TeacherScores, given_by_teacher
from hotseat.loop.workers.cutting import BatchSettings
from hotseat.loop.workers.experience import Share, flatten
from hotseat.loop.workers.model_workers import ModelWorker
from hotseat.loop.workers.teachers import TeachersWorker
from hotseat.model_source import ModelSource
from hotseat.observe import read_lines
from hotseat.placement.memory_settings import Layout
from hotseat.planning.role_specs import role_specs
from hotseat.train.backend import TrainOptions
from hotseat.train.divergence import TEACHER_FIELDS
from hotseat.train.teacher_head import load_head
from hotseat.types import GIVEN_VERSION, Segment

pytestmark = pytest.mark.slow

LOG = "{samples_per_step: 8, samples_every: 1}"
OPTIONS, CUT = TrainOptions(optimizer=None), BatchSettings(2, None)


@pytest.fixture
def task(tmp_path):
    return make_task(tmp_path)


def teacher(task: Path, name: str = "teacher", seed: int = 1) -> Path:
    """The task's model with other weights, and with a head that makes its distributions less flat."""
    folder = task / name
    shutil.copytree(task / "model", folder)
    torch.manual_seed(seed)
    found = load_file(folder / "model.safetensors")
    changed = {key: value + 0.05 * torch.randn_like(value) for key, value in found.items()}
    changed["model.embed_tokens.weight"] *= 3
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def yaml_of(task: Path, name: str, distill: str, **changes: str) -> str:
    sections = {
        "name": name,
        "reward": "",
        "algorithm": f"{{distill: {{coef: 1.0, {distill}}}}}",
        "reference": f"{{model: {task}/teacher}}",
        "rollout": "{batch_size: 8, samples_per_prompt: 1, max_new_tokens: 4, num_slots: 8}",
        "train": "{dtype: fp32, batch_size: 4, micro_batch_size: 2, num_episodes: 8}",
    }
    return rl_yaml(task, **(sections | changes))


def go(task: Path, name: str, distill: str, **changes: str) -> list[dict]:
    start(loads(yaml_of(task, name, distill, **changes)))
    return read_lines(task / "runs" / name / "metrics.jsonl")


def test_a_policy_comes_nearer_to_its_teacher_without_rewards(task, capsys):
    teacher(task)
    records = go(task, "whole", "top_k: null")
    distances = [record["divergence"] for record in records if "divergence" in record]
    assert len(distances) == 8
    assert distances[-1] < 0.5 * distances[0]
    assert "nothing is learned" not in capsys.readouterr().out
    # Fifteen of sixteen tokens, and the last one alone, are the whole vocabulary.
    go(task, "top", "top_k: 15")
    whole, top = weights(task, "whole"), weights(task, "top")
    assert not same(whole, load_file(task / "model" / "model.safetensors"))
    for name, weight in whole.items():
        torch.testing.assert_close(top[name], weight, rtol=0, atol=1e-4)


@pytest.mark.long
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(task):
    teacher(task)
    with_answers(task)
    every = {"checkpoint": "{every: 1}"}
    mixed = "top_k: 5, divergence: jsd, temperature: 2.0, sampled: 0.5, answer_key: worked"
    for name, distill in (("whole", "top_k: null"), ("mixed", mixed)):
        go(task, name, distill, **every)
        with stopped_after_saving(2):
            go(task, f"{name}-again", distill, **every)
        go(task, f"{name}-again", distill, checkpoint="{every: 1, resume: true}")
        assert same(weights(task, f"{name}-again"), weights(task, name))


@pytest.mark.long
def test_rewards_and_the_teacher_add_up(task):
    teacher(task)
    changes = {
        "reward": f"{{function: {task}/reward.py}}",
        "rollout": "{batch_size: 4, samples_per_prompt: 4, max_new_tokens: 4, num_slots: 8}",
        "train": "{dtype: fp32, batch_size: 8, micro_batch_size: 4, num_episodes: 1}",
    }
    records = go(task, "both", "top_k: 6, tail: renormalise, divergence: forward_kl", **changes)
    assert all(record["divergence"] > 0 for record in records[1:])
    go(task, "alone", "top_k: 6, tail: renormalise, divergence: forward_kl", **{**changes, "reward": ""})
    assert not same(weights(task, "both"), weights(task, "alone"))


def test_each_prompt_gets_its_own_teachers_distributions(task):
    models = {"a": ModelSource(str(teacher(task, "a", 1))), "b": ModelSource(str(teacher(task, "b", 2)))}
    groups = [
        replace(group, prompt=replace(group.prompt, source=source))
        for group, source in ((make_group(0, [0.0, 1.0]), "b"), (make_group(1, [1.0]), "a"))
    ]
    shares, how = [Share(tuple(groups), ((0, 0), (0,)))], Divergence("reverse_kl", top_k=3, vocab_size=16)

    def given(worker: ModelWorker) -> TeacherScores:
        found = worker.teach(shares, CUT, 1.0, how)
        worker.close()
        return pickle.loads(pickle.dumps(found))

    a, b = (given(ModelWorker(model, OPTIONS)) for model in models.values())
    routed = given(TeachersWorker(models, None, OPTIONS))
    batch = flatten(groups)
    fields = given_by_teacher(batch, [routed])
    assert set(fields) == {"teacher_ids", "teacher_log_probs"} < set(TEACHER_FIELDS)
    for name, values in fields.items():
        expected = {sample: (a if sample.split("/")[1] == "1" else b).fields[name][sample] for sample in routed}
        assert torch.equal(values, torch.cat([expected[sample][0] for sample in batch.sample_ids]))
        assert values.shape == (batch.num_tokens, 3 if name == "teacher_ids" else 4)
        assert not torch.equal(a.fields[name]["0/0/0"][0], b.fields[name]["0/0/0"][0])


def test_hidden_states_travel_in_their_own_type(task):
    options = replace(OPTIONS, precision="bf16")
    worker = ModelWorker(ModelSource(str(teacher(task))), options)
    share = [Share((make_group(0, [0.0, 1.0]),), ((0, 0),))]
    found = worker.teach(share, CUT, 1.0, Divergence("reverse_kl", vocab_size=16))
    sent = pickle.loads(pickle.dumps(found))
    hidden = found.fields["teacher_hidden"]
    for sample, segments in hidden.items():
        assert segments[0].dtype == torch.bfloat16
        assert torch.equal(sent.fields["teacher_hidden"][sample][0], segments[0])
    assert sent.keys() == found.keys()
    worker.close()


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_head_of_a_teacher_is_read_out_of_its_checkpoint(tmp_path, is_tied):
    import transformers

    torch.manual_seed(0)
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=16, tie_word_embeddings=is_tied, **shape)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    head = load_head(ModelSource(str(tmp_path)), torch.float32)
    assert torch.equal(head.weight, model.lm_head.weight)
    assert (head.bias, head.scale, head.cap) == (None, 1.0, None)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"is not in its \*.safetensors.*: set algorithm.distill.top_k"):
        load_head(ModelSource(str(tmp_path)), torch.float32)


def test_a_teacher_with_other_tokens_is_refused_before_a_model_loads(task):
    import transformers

    other = teacher(task)
    tokenizer = transformers.AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<step>"])
    tokenizer.save_pretrained(other)
    with pytest.raises(
        UserError, match=r"1 tokens differ \('<step>' is absent and \d+\); a policy learns what a teacher"
    ):
        go(task, "other", "top_k: 4")
    tokenizer = transformers.AutoTokenizer.from_pretrained(task / "model", eos_token="7")
    tokenizer.save_pretrained(other)
    with pytest.raises(UserError, match="the eos_token is .* and '7'; a policy learns what a teacher says of its own"):
        go(task, "other", "top_k: 4")


def test_the_plan_counts_what_a_teacher_gives(task):
    teacher(task)

    def terms(distill: str) -> dict[str, float]:
        (actor,) = (spec for spec in role_specs(loads(yaml_of(task, "plan", distill))) if spec.name == "actor")
        memory = actor.estimate(Layout(num_procs=1))
        assert memory is not None
        return {term.name: term.gib for term in memory.working["train"]}

    whole, top = terms("top_k: null"), terms("top_k: 5")
    assert whole["teacher's head"] == pytest.approx(16 * 16 * 4 / 2**30)
    assert "teacher's head" not in top
    assert top["teacher's distributions"] > 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"reference": ""}, "reference.model: not set: it is the teacher from which algorithm.distill.coef has"),
        (
            {"reference": "{teachers: {a: m, b: n}, teacher_weights: {a: 0.5, b: 0.5}}"},
            "distributions of several teachers are not mixed yet",
        ),
        ({"distill": "top_k: null", "reference": "{teachers: {a: m}}"}, "only the most likely tokens are compared yet"),
        ({"cluster": "{component_placement: {'actor,reward': 0}}"}, "reward.function: no source of rewards"),
        ({"distill": "beta: 0.3"}, "algorithm.distill.divergence is reverse_kl; this is for jsd"),
        ({"distill": "top_k: null, tail: renormalise"}, "top_k is not set, so the whole vocabulary is compared"),
        (
            {"train": "{backend: deepspeed, deepspeed: {deepcompile: true}}"},
            "a divergence from a teacher is not part of what it compiles",
        ),
        ({"algorithm": "{distill: {divergence: jsd}}"}, "algorithm.distill.coef is 0, so nothing is learned"),
    ],
)
def test_what_does_not_go_together_is_refused(task, changes, says):
    distill = changes.pop("distill", "top_k: 4")
    with pytest.raises((ConfigError, UserError)) as error:
        start(loads(yaml_of(task, "bad", distill, **changes)))
    assert says in str(error.value)


# --- answers that the data gives --------------------------------------------------------------------------------------


def with_answers(task: Path) -> None:
    rows = [json.loads(line) for line in (task / "prompts.jsonl").read_text().splitlines()]
    write_rows(task / "prompts.jsonl", [{**row, "worked": row["label"] * 2} for row in rows])


@pytest.mark.long
def test_answers_are_given_sampled_or_mixed_by_seed(task):
    teacher(task)
    with_answers(task)
    short = {"train": "{dtype: fp32, batch_size: 8, micro_batch_size: 4, num_episodes: 4}", "log": LOG}
    texts = {}
    for name, sampled in (("given", 0.0), ("mixed", 0.5), ("again", 0.5)):
        records = go(task, name, f"top_k: 5, sampled: {sampled}, answer_key: worked", **short)
        assert all(record["divergence"] > 0 for record in records if "divergence" in record)
        lines = (task / "runs" / name / "samples.jsonl").read_text().splitlines()
        texts[name] = [json.loads(line)["segments"][0] for line in lines]
        if name == "given":
            assert records[-1]["divergence"] < records[1]["divergence"]
    assert same(weights(task, "mixed"), weights(task, "again"))
    assert not same(weights(task, "mixed"), weights(task, "given"))
    num_given = {name: sum(GIVEN_VERSION in each["versions"] for each in found) for name, found in texts.items()}
    assert num_given["given"] == len(texts["given"]) == 32
    assert 0 < num_given["mixed"] == num_given["again"] < 32
    for segment in texts["given"]:
        learned = [text for text, is_learned in zip(segment["text"], segment["sampled"], strict=True) if is_learned]
        assert len(learned) == 3  # two digits and the end
        assert learned[0] == learned[1] == segment["text"][0]  # of `1+2=` the answer is 11
        assert set(segment["engine_log_probs"]) == {None}
        assert None not in segment["trainer_log_probs"][-3:]


def test_the_divergence_on_given_answers_is_that_of_whole_logits(task):
    """Off-policy distillation of one step is what whole logits of both models in transformers give."""
    import transformers

    folder = teacher(task)
    with_answers(task)
    records = go(
        task,
        "given",
        "top_k: null, divergence: jsd, beta: 0.3, temperature: 1.5, sampled: 0.0, answer_key: worked",
        train="{dtype: fp32, batch_size: 8, micro_batch_size: 2, num_episodes: 1}",
        rollout="{batch_size: 8, samples_per_prompt: 1, max_new_tokens: 4, num_slots: 8}",
    )
    student, expert = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for path in (task / "model", folder)
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(task / "model")
    apart = []
    for line in (task / "prompts.jsonl").read_text().splitlines():
        row = json.loads(line)
        context = tokenizer(row["input"], add_special_tokens=False)["input_ids"]
        answer = [*tokenizer(row["worked"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            p, q = (
                (model(torch.tensor([context + answer])).logits[0, len(context) - 1 : -1].double() / 1.5).log_softmax(
                    -1
                )
                for model in (student, expert)
            )
        m = (0.3 * q.exp() + 0.7 * p.exp()).log()
        apart += (0.3 * (q.exp() * (q - m)).sum(-1) + 0.7 * (p.exp() * (p - m)).sum(-1)).tolist()
    assert len(apart) == 24
    assert records[1]["divergence"] == pytest.approx(sum(apart) / len(apart), rel=1e-4)
    assert records[1]["loss"] == pytest.approx(sum(apart) / len(apart), rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "algorithm.distill.answer_key: not set, and algorithm.distill.sampled is below 1"),
        ({"distill": "answer_key: worked, sampled: 0.5", "reward": "{function: r.py}"}, "a source of rewards is for"),
        ({"distill": "answer_key: worked, sampled: 0.5", "overlap": "{staleness: 1}"}, "overlap.staleness is for"),
        ({"distill": "answer_key: worked"}, "algorithm.distill.sampled is 1.0, so no answer is given"),
        ({"distill": "answer_key: worked, sampled: 0.5"}, "'worked': 8 of 8 prompts have no text there"),
    ],
)
def test_given_answers_that_cannot_be_learned_are_refused(task, changes, says):
    teacher(task)
    distill = changes.pop("distill", "sampled: 0.5")
    with pytest.raises((ConfigError, UserError)) as error:
        start(loads(yaml_of(task, "bad", distill, **changes)))
    assert says in str(error.value)


# --- prompts of the teacher -------------------------------------------------------------------------------------------


def test_a_teacher_reads_its_own_prompt_before_the_same_answers(task):
    """What it gives is that of the longer text, at the tokens of the policy's shorter one."""
    worker, other = ModelWorker(ModelSource(str(teacher(task))), OPTIONS), (4, 5, 6, 7, 8)
    own = make_group(0, [0.0, 1.0])
    told = replace(own, prompt=replace(own.prompt, teacher_prompt=other))
    episodes = [replace(each.episode, segments=(behind(each.episode.segments[0], other),)) for each in own.samples]
    samples = [replace(each, episode=episode) for each, episode in zip(own.samples, episodes, strict=True)]
    longer = replace(own, samples=tuple(samples))
    how = Divergence("reverse_kl", top_k=3, vocab_size=16)
    found, expected, plain = (
        worker.teach([Share((group, make_group(1, [1.0])), ((0, 0), (0,)))], CUT, 1.0, how)
        for group in (told, longer, own)
    )
    worker.close()
    for sample in ("0/0/0", "0/0/1"):
        pairs = [(found, expected), *((found.fields[name], expected.fields[name]) for name in found.fields)]
        for ours, theirs in pairs:
            assert len(ours[sample][0]) == 5
            torch.testing.assert_close(ours[sample][0][3:], theirs[sample][0][5:])
        assert not torch.equal(found[sample][0], plain[sample][0])
    torch.testing.assert_close(found["0/1/0"], plain["0/1/0"])


def behind(segment: Segment, context: tuple[int, ...]) -> Segment:
    """The two sampled tokens of a segment behind another context."""
    longer = make_segment(len(context), 2)
    return replace(longer, token_ids=torch.cat([torch.tensor(context), segment.token_ids[-2:]]))


def test_a_policy_learns_from_itself_with_more_in_the_prompt(task):
    rows = [json.loads(line) for line in (task / "prompts.jsonl").read_text().splitlines()]
    write_rows(task / "prompts.jsonl", [{**row, "told": f"{row['label']}7+{row['input']}"} for row in rows])
    changes = {
        "reference": f"{{model: {task}/model}}",
        "train": "{dtype: fp32, batch_size: 8, micro_batch_size: 4, num_episodes: 1}",
    }
    records = go(task, "told", "top_k: 5, teacher_input_key: told", **changes)
    alone = go(task, "alone", "top_k: 5", **changes)
    assert records[1]["divergence"] > 0
    assert alone[1]["divergence"] == pytest.approx(0.0, abs=1e-6)  # the policy is where its teacher is
    with pytest.raises(UserError, match="'hint': 8 of 8 prompts have none there"):
        go(task, "lacking", "top_k: 5, teacher_input_key: hint", **changes)
    with pytest.raises(ConfigError, match="prompts of a teacher are not built for overlap.staleness yet"):
        go(task, "stale", "top_k: 5, teacher_input_key: told", overlap="{staleness: 1}", **changes)
