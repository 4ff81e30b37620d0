"""On-policy distillation from several teachers: each prompt from its own, or every prompt from all of them."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loop_cases import make_group, rl_yaml, same, weights
from safetensors.torch import load_file, save_file

from hotseat.checks.model_configs import teachers
from hotseat.checks.stage import DataContext
from hotseat.config import loads
from hotseat.errors import ConfigError, UserError
from hotseat.loop.run import start
from hotseat.loop.workers.cutting import BatchSettings
from hotseat.loop.workers.experience import Share
from hotseat.loop.workers.model_workers import ModelWorker
from hotseat.loop.workers.teachers import TeachersWorker
from hotseat.model_source import ModelSource
from hotseat.train.backend import TrainOptions
from hotseat.types import Prompt

DISTILL = "{distill_coef: 1.0}"


def teacher(task: Path, name: str, seed: int) -> Path:
    """A copy of the model with other weights."""
    folder = task / name
    shutil.copytree(task / "model", folder)
    torch.manual_seed(seed)
    found = load_file(folder / "model.safetensors")
    changed = {key: value + 0.05 * torch.randn_like(value) for key, value in found.items()}
    save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def go(task: Path, name: str, reference: str) -> dict[str, torch.Tensor]:
    (task / "zero.py").write_text("def reward_func(queries, prompts, labels):\n    return [0.0] * len(queries)\n")
    reward = f"{{function: {task}/zero.py}}"
    start(loads(rl_yaml(task, name=name, reward=reward, reference=reference, algorithm=DISTILL)))
    return weights(task, name)


def name_sources(task: Path, *sources: str) -> None:
    """Have the prompts name these sources in turn."""
    rows = [json.loads(line) for line in (task / "prompts.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row["datasource"] = sources[number % len(sources)]
    (task / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
@pytest.mark.long
def test_teachers_take_turns_and_each_prompt_learns_from_its_own(task):
    a, b = teacher(task, "a", 1), teacher(task, "b", 2)
    name_sources(task, "one", "one")
    alone = go(task, "alone", f"{{model: {a}}}")
    # With all prompts naming one of the teachers, the other has nothing to say.
    assert same(go(task, "routed", f"{{teachers: {{one: {a}, two: {b}}}}}"), alone)
    assert same(go(task, "last", f"{{teachers: {{two: {b}, one: {a}}}}}"), alone)
    # A mixture of a model with itself is that model: halves have no roundings.
    halves = go(task, "halves", f"{{teachers: {{x: {a}, y: {a}}}, teacher_weights: {{x: 0.5, y: 0.5}}}}")
    assert same(halves, alone)
    name_sources(task, "one", "two")
    mixed = go(task, "mixed", f"{{teachers: {{one: {a}, two: {b}}}}}")
    assert not same(mixed, alone)
    with pytest.raises(UserError, match=r"4 of 8 prompts name no teacher in their column datasource: 'two' \(4\)"):
        go(task, "lacking", f"{{teachers: {{one: {a}, three: {b}}}}}")


@pytest.mark.slow
def test_log_probs_of_all_teachers_are_added_by_weight_and_of_one_by_source(task):
    models = {"a": str(teacher(task, "a", 1)), "b": str(teacher(task, "b", 2))}
    groups = [
        replace(group, prompt=replace(group.prompt, source=source))
        for group, source in ((make_group(0, [0.0, 1.0]), "b"), (make_group(1, [1.0]), "a"))
    ]
    shares = [Share(tuple(groups), ((0, 0), (0,)))]
    options, cut = TrainOptions(optimizer=None), BatchSettings(2, None)

    def scores(worker: ModelWorker) -> dict[str, torch.Tensor]:
        found = [worker.score(shares, cut, 1.0) for _ in range(2)][1]  # the second time another one is on the device
        worker.close()
        return {sample: torch.cat(segments) for sample, segments in found.items()}

    sources = {name: ModelSource(model) for name, model in models.items()}
    a, b = (scores(ModelWorker(model, options)) for model in sources.values())
    mixed = scores(TeachersWorker(sources, {"a": 0.25, "b": 0.75}, options))
    routed = scores(TeachersWorker(sources, None, options))
    assert mixed.keys() == routed.keys() == a.keys()
    for sample in a:
        torch.testing.assert_close(mixed[sample], 0.25 * a[sample] + 0.75 * b[sample])
        own = a if sample.split("/")[1] == "1" else b
        torch.testing.assert_close(routed[sample], own[sample])
        assert not torch.equal(a[sample], b[sample])


def test_prompts_without_a_teacher_are_found_before_a_model_loads():
    config = loads(f"reference: {{teachers: {{math: m, code: c}}}}\nalgorithm: {DISTILL}")
    prompts = [Prompt(0, "p", (1,), None, "math"), Prompt(1, "p", (1,), None, "")]
    [problem] = teachers(DataContext(config=config, prompts=prompts))
    found = r"1 of 2 prompts name no teacher .*: none \(1\); teachers are math, code\."
    assert re.search(found, problem.message)
    assert list(teachers(DataContext(config=config, prompts=prompts[:1]))) == []
    weighted = "{teachers: {math: m, code: c}, teacher_weights: {math: 0.25, code: 0.75}}"
    by_weight = loads(f"reference: {weighted}\nalgorithm: {DISTILL}")
    assert list(teachers(DataContext(config=by_weight, prompts=prompts))) == []


@pytest.mark.parametrize(
    ("reference", "algorithm", "says"),
    [
        ("{teachers: {a: m}}", "{kl: {coef: 0.1}}", "algorithm.distill_coef is 0, so nothing is learned from teachers"),
        ("{teachers: {a: m}, model: n}", DISTILL, "reference.model: reference.teachers is set too"),
        (
            "{teachers: {a: m, b: n}, teacher_weights: {a: 1.0}}",
            DISTILL,
            "for a, but reference.teachers are a, b: give each teacher a weight",
        ),
        ("{teachers: {a: m, b: n}, teacher_weights: {a: 0.5, b: 0.6}}", DISTILL, "add up to 1.1 instead of 1"),
    ],
)
def test_what_does_not_go_together_is_refused(reference, algorithm, says):
    with pytest.raises(ConfigError) as error:
        loads(f"reference: {reference}\nalgorithm: {algorithm}")
    assert says in str(error.value)
