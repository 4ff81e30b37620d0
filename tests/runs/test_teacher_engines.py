"""A teacher on vLLM's CPU build teaches what it teaches behind a training backend."""

import importlib.util
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loop_cases import make_group, make_task, rl_yaml, weights
from safetensors.torch import load_file, save_file

from hotseat.algorithms.distillation import Divergence
from hotseat.config import loads
from hotseat.errors import HotseatError
from hotseat.loop.run import start
from hotseat.loop.settings.rollout_settings import teacher_engine_settings
from hotseat.loop.workers.cutting import BatchSettings
from hotseat.loop.workers.experience import Share
from hotseat.loop.workers.model_workers import ModelWorker
from hotseat.loop.workers.teacher_engine import TeacherEngineWorker
from hotseat.model_source import ModelSource
from hotseat.observe import read_lines
from hotseat.placement.memory_settings import EngineMemory, Layout
from hotseat.planning.role_specs import role_specs
from hotseat.rollout.kinds import EngineSettings
from hotseat.train.backend import TrainOptions

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

# Heads of a width that vLLM takes.
SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
CUT = BatchSettings(2, None)
SAMPLED = slice(3, None)  # tokens of `make_group` behind its prompts


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task, and a teacher: its model with other weights."""
    folder = make_task(tmp_path_factory.mktemp("task"), **SHAPE)
    shutil.copytree(folder / "model", folder / "teacher")
    torch.manual_seed(1)
    found = load_file(folder / "model" / "model.safetensors")
    changed = {key: value + 0.05 * torch.randn_like(value) for key, value in found.items()}
    changed["model.embed_tokens.weight"] *= 3
    save_file(changed, folder / "teacher" / "model.safetensors", metadata={"format": "pt"})
    return folder


def yaml_of(task: Path, name: str, distill: str = "top_k: 5", **changes: str) -> str:
    sections = {
        "name": name,
        "reward": "",
        "algorithm": f"{{distill: {{coef: 1.0, {distill}}}}}",
        "reference": f"{{model: {task}/teacher, engine: vllm}}",
        "rollout": "{batch_size: 4, samples_per_prompt: 1, max_new_tokens: 4, num_slots: 8}",
        "train": "{dtype: fp32, batch_size: 4, micro_batch_size: 2, num_episodes: 1}",
    }
    return rl_yaml(task, **(sections | changes))


def settings_of(task: Path) -> EngineSettings:
    settings = teacher_engine_settings(loads(yaml_of(task, "worker")), task / "logs")
    assert settings is not None
    return settings


def test_an_engine_says_of_answers_what_the_training_backend_does(task: Path) -> None:
    on_engine = TeacherEngineWorker(settings_of(task))
    behind_backend = ModelWorker(ModelSource(str(task / "teacher")), TrainOptions(optimizer=None))
    group = make_group(0, [0.0, 1.0])
    other = make_group(1, [1.0], sampled=4)
    told = replace(other, prompt=replace(other.prompt, teacher_prompt=(4, 5, 6, 7)))
    shares = [Share((group, told), ((0, 0), (0,)))]
    for how in (
        Divergence("reverse_kl", top_k=5),
        Divergence("reverse_kl", temperature=1.7, top_k=3, tail="renormalise"),
        Divergence("jsd", top_k=5, vocab_size=12),
    ):
        ours, theirs = (worker.teach(shares, CUT, 0.8, how) for worker in (on_engine, behind_backend))
        assert ours.keys() == theirs.keys()
        assert ours.fields.keys() == theirs.fields.keys() == {"teacher_ids", "teacher_log_probs"}
        for sample in theirs:
            torch.testing.assert_close(ours[sample][0][SAMPLED], theirs[sample][0][SAMPLED], rtol=0, atol=2e-5)
            for name, of_engine in ours.fields.items():
                one, other = of_engine[sample][0], theirs.fields[name][sample][0]
                assert one.dtype == other.dtype
                assert one.shape == other.shape
                torch.testing.assert_close(one[SAMPLED], other[SAMPLED], rtol=0, atol=5e-5)
    scores = [worker.score(shares, CUT, 0.8) for worker in (on_engine, behind_backend)]
    for sample in scores[1]:
        torch.testing.assert_close(scores[0][sample][0][SAMPLED], scores[1][sample][0][SAMPLED], rtol=0, atol=2e-5)
    assert on_engine.teach([], CUT, 0.8, Divergence("reverse_kl", top_k=5)) == {}  # a rank that got no groups
    on_engine.close()
    behind_backend.close()


def go(task: Path, name: str, **changes: str) -> list[dict]:
    start(loads(yaml_of(task, name, **changes)))
    return read_lines(task / "runs" / name / "metrics.jsonl")


@pytest.mark.parametrize("runtime", ["local", pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.long])])
def test_a_policy_learns_the_same_from_a_teacher_on_an_engine(task: Path, runtime: str) -> None:
    cluster = f"{{runtime: {runtime}, component_placement: {{actor: 0, rollout: '@actor', reference: 1}}}}"
    on_engine = go(task, f"engine-{runtime}", cluster=cluster)
    behind_backend = go(task, f"backend-{runtime}", cluster=cluster, reference=f"{{model: {task}/teacher}}")
    assert len(on_engine) == len(behind_backend)
    for one, other in zip(on_engine[1:], behind_backend[1:], strict=True):
        assert other["divergence"] > 0.1
        assert one["divergence"] == pytest.approx(other["divergence"], rel=1e-3)
        assert one["kl"] == pytest.approx(other["kl"], rel=1e-3, abs=1e-4)
    ours, theirs = weights(task, f"engine-{runtime}"), weights(task, f"backend-{runtime}")
    before = load_file(task / "model" / "model.safetensors")
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=1e-3)
        assert not torch.equal(weight, before[name])


def test_the_plan_counts_a_teachers_cache_and_the_logits_of_a_sequence(task: Path) -> None:
    [reference] = (spec for spec in role_specs(loads(yaml_of(task, "plan"))) if spec.name == "reference")
    assert isinstance(reference.memory, EngineMemory)
    memory = reference.estimate(Layout(num_procs=1))
    assert memory is not None
    [cache] = memory.parts["kv_cache"]  # of 8 sequences of 16 tokens: keys and values of 32 numbers, 2 layers, fp32
    assert cache.gib == pytest.approx(8 * 16 * 2 * 32 * 2 * 4 / 2**30)
    assert "16 tokens x 16" in memory.working["forward"][0].formula


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"reference": "{model: m, engine: transformers}"},
            "transformers, which says no likely tokens: set it to vllm",
        ),
        ({"reference": "{teachers: {a: m}, engine: vllm}"}, "an engine has one model: set reference.model"),
        ({"distill": "top_k: null"}, "an engine gives no hidden states: set that to 64 or so"),
        (
            {"train": "{packing: true, sequence_parallel_size: 2}"},
            "sequence_parallel_size is above 1, and each of its processes has a whole model",
        ),
        (
            {"data": "{path: p.jsonl, image_key: image}"},
            "there are images, which a teacher on an engine is not built for yet",
        ),
        (
            {"algorithm": "{kl: {coef: 0.1}}", "reward": "{function: r.py}"},
            "reference.engine: has no effect: algorithm.distill.coef is 0",
        ),
        (
            {"data": "{path: prompts.jsonl, label_key: label, max_length: 32}"},
            "data.max_length is all of its 32 positions: set that to 31 or less, or leave reference.engine unset",
        ),
    ],
)
def test_what_an_engine_cannot_do_for_a_teacher_is_refused(task: Path, changes: dict, says: str, monkeypatch) -> None:
    monkeypatch.chdir(task)
    with pytest.raises(HotseatError) as error:
        start(loads(yaml_of(task, "bad", **changes)))
    assert says in str(error.value)
