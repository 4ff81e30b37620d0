"""Every key of the config, in every task: with another value than the default it is refused, noted, or used by the run.

What a run uses is what its code reads of the config, while a whole run goes on.
"""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from loop_cases import dpo_yaml, make_task, make_value_model, ppo_yaml, rl_yaml, rm_yaml, sft_yaml
from pydantic import BaseModel

import hotseat
from hotseat.config import Config, loads
from hotseat.config import conditions as when
from hotseat.config.annotations import tables_of
from hotseat.config.load import check, fields_of, validate
from hotseat.config.schema import acts_after_sampling, conditions_of, tasks_of
from hotseat.config.unsupported import unsupported
from hotseat.config.yaml_lines import Document, read_yaml
from hotseat.errors import Problem
from hotseat.loop.rl.rollout import group_filter
from hotseat.loop.settings.rollout_settings import engine_settings, host_settings, rollout_sampling
from hotseat.loop.start import start

pytestmark = pytest.mark.slow

# Code that checks a key, or advises another value, does not do what the key says.
NOT_USERS = (
    *("config/conflicts.py", "config/conditions.py", "config/load.py", "config/unsupported.py", "config/changes.py"),
    *("checks/named_files.py", "checks/cpu.py", "planning/advisor.py"),
)
# Keys that loading a config uses up.
LOADING = {"task", "cluster.component_names"}
# Values of keys that take more than any text, number or word.
VALUES: Mapping[str, Any] = {
    "reward.functions": [{"function": "other.py"}],
    "cluster.component_placement": {"actor": "0"},
    "cluster.component_names": {"policy": "actor"},
    "cluster.node_groups": [{"label": "a"}],
    "flow": [{"name": "learn", "train": ["actor"]}],
    "components": {"mine": {"path": "a.py:Mine"}},
    "data.sampler": "a.py:sample",
    "eval.sets": {"sums": {"path": "e"}},
    "reference.engine": "vllm",
    "reference.teacher_weights": {"a": 1.0},
    "reward.judge.choices": {"good": 1.0},
    "reward.graders": [{"kind": "exact"}],
    "reward.parts": {"a": 1.0},
    "eval.graders": [{"kind": "exact"}],
    "algorithm.dual_clip": 3.0,
    "algorithm.dpo.label_smoothing": 0.1,
}
AGENT = """
async def step(observation, action, label, **kwargs):
    return {"rewards": 1.0, "environment_feedback": "+", "done": len(observation) > 8}
"""
WALK = Path(__file__).parents[1] / "helpers" / "walk_env.py"


class Watch:
    """Records which keys of a config are read by code that uses them."""

    def __init__(self) -> None:
        self.keys: set[str] = set()

    def over(self, section: BaseModel, at: str = "") -> Any:
        """Return a copy of a config, or of a section at a key, whose keys are recorded when they are read."""
        watch, plain = self, type(section)

        class Watched(plain):  # type: ignore[misc, valid-type]
            def __getattribute__(self, name: str) -> Any:
                if name in plain.model_fields and watch.is_used():
                    watch.keys.add(f"{at}{name}")
                return super().__getattribute__(name)

        values = {
            name: self.over(value, f"{at}{name}.") if isinstance(value, BaseModel) else value
            for name, value in section.__dict__.items()
        }
        return Watched.model_construct(section.model_fields_set, **values)

    def is_used(self) -> bool:
        """Tell whether the code that reads now belongs to the run, and not to a check."""
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None:
            if any(each in frame.f_code.co_filename for each in NOT_USERS):
                return False
            frame = frame.f_back
        return True


def other_value(key: str, info: Any) -> Any:
    """Return a value that a field accepts and that is not its default."""
    names = [name for table in tables_of(info) for name in table]
    possible = [VALUES[key]] if key in VALUES else names or candidates(info.annotation, info.default)
    return next(value for value in possible if value != info.default)


def candidates(annotation: Any, default: Any) -> Iterator[Any]:
    origin, members = get_origin(annotation), get_args(annotation)
    if origin is typing.Literal:
        yield from members
    elif origin is typing.Annotated:
        yield from candidates(members[0], default)
    elif origin in (typing.Union, types.UnionType):
        for member in members:
            yield from candidates(member, default)
    elif annotation is bool:
        yield not default
    elif annotation is int:
        yield default + 1 if isinstance(default, int) else 2
    elif annotation is float:
        yield default * 1.5 if isinstance(default, float) and default > 1 else 0.25
        yield 0.5
    elif annotation is str:
        yield "other"
    elif origin is list:
        yield ["other"]
    elif origin is dict:
        yield {"other": "other"}
    elif origin is tuple:
        yield [0.25, 0.5]


def with_key(values: Mapping[str, Any], key: str, value: Any) -> Document:
    document = Document(deepcopy(dict(values)))
    node = document.values
    *sections, leaf = key.split(".")
    for section in sections:
        node = node.setdefault(section, {})
    node[leaf] = value
    return document


def unnamed_keys(
    text: str, used: set[str], find: Callable[[Document], tuple[Config, list[Problem]]] = check
) -> list[str]:
    """Return the keys that neither the run uses, nor a refusal names, nor the list of what is not built."""
    values, unnamed = read_yaml(text).values, []
    for key, info in fields_of(Config):
        config, problems = find(with_key(values, key, other_value(key, info)))
        is_refused = any(key == problem.key or key in problem.message for problem in problems)
        is_noted = key in [feature for feature, _ in unsupported(config)]
        if not is_refused and not is_noted and key not in used | LOADING:
            unnamed.append(key)
    return unnamed


def used_by(text: str) -> set[str]:
    """Return the keys that a run uses, from its start to its end."""
    watch = Watch()
    start(watch.over(loads(text)))
    return watch.keys


# Of two steps the first is saved by time, if at all, and the second by its number.
SAVED = {"checkpoint": "{every: 2}"}
SHORT = {"train": "{dtype: fp32, batch_size: 4, micro_batch_size: 2}", "eval": ""}
PAIRS = {"train": "{dtype: fp32, batch_size: 128, micro_batch_size: 64}", "eval": ""}


# Configs in which conditions do not hold, beside the empty one.
WITHOUT = (
    "checkpoint: {every_minutes: 0}",
    "cluster: {runtime: local}",
    "log: {samples_per_step: 0}",
    "data: {path: d}",
    "data: {path: d, sampler: 'a.py:sample'}",
    "data: {path: d, apply_chat_template: true}",
    "data: {path: d, image_key: i, max_images_per_prompt: 1}",
    "eval: {path: e}",
    "env: {path: gym, eval_seeds: 1}",
    "env: {path: gym, images: true}",
    "agent: {path: a.py}",
    "agent: {command: [a]}",
    "overlap: {staleness: 1}",
    "train: {dtype: fp32}",
    "train: {lora: {rank: 4}}",
    "train: {micro_batch_size: 2}\nrollout: {micro_batch_size: 2}",
    "train: {max_tokens_per_device: 4096}\nrollout: {max_tokens_per_device: 4096}",
    "rollout: {engine: vllm}",
    "rollout: {engine: numeric}",
    "algorithm: {estimator: gae}",
    "algorithm: {estimator: gae}\nactor: {optimizer: {schedule: constant}}\ncritic: {optimizer: {schedule: constant}}",
    "algorithm: {estimator: rloo}",
    "algorithm: {policy_loss: cispo}",
    "algorithm: {policy_loss: sapo}",
    "algorithm: {policy_loss: gspo, correction: {kind: rollout-ratio}}",
    "algorithm: {kl: {coef: 0.1}}",
    "algorithm: {kl: {coef: 0.1, target: 1.0}}",
    "algorithm: {distill: {coef: 1.0}}\nreference: {model: m}",
    "algorithm: {distill: {coef: 1.0, top_k: null}}\nreference: {model: m}",
    "reward: {url: 'http://u'}",
    "reward: {model: m}",
    "reward: {graders: [{kind: code}], sandbox: {command: ['{folder}']}}",
    "reward: {judge: {rubric: r}}",
    "reward: {judge: {rubric: r, url: 'http://u/v1'}}",
    "reward: {judge: {rubric: r, engine: {kind: vllm}}}",
    "task: dpo",
    "task: dpo\nalgorithm: {dpo: {loss: ipo}}",
    "task: dpo\nalgorithm: {dpo: {loss: orpo}}",
    "task: dpo\nalgorithm: {dpo: {precompute: true}}",
    "task: dpo\ntrain: {lora: {rank: 4}}",
)


def first_unmet(config: Config, key: str) -> tuple[Any, str | None]:
    """Return the first condition of a key that does not hold, and the reason; (None, None) if all hold."""
    unmet = ((each, each.problem(config, section)) for section, each in conditions_of(key))
    return next((pair for pair in unmet if pair[1] is not None), (None, None))


def test_every_key_is_refused_by_each_condition_that_does_not_hold():
    """There is a config for each condition of each key in which it is the first that does not hold."""
    fields, bases = dict(fields_of(Config)), {text: (loads(text), read_yaml(text).values) for text in ("", *WITHOUT)}
    seen, unnamed = set(), []
    for key, info in fields.items():
        for text, (base, values) in bases.items():
            if base.task not in tasks_of(key) or first_unmet(base, key)[0] is None:
                continue
            config, problems = check(with_key(values, key, other_value(key, info)))
            condition, reason = first_unmet(config, key)
            seen.add((key, condition))
            named = [each.message for each in problems if each.key == key]
            if reason is not None and f"has no effect: {reason}; remove it" not in named:
                unnamed.append((key, text, reason))
    assert not unnamed
    expected = {(key, each) for key in fields for _, each in conditions_of(key)}
    # The key itself meets the condition, or the condition is about dpo alone, and the key is for rl.
    met = {("reward.judge.rubric", when.JUDGE), ("env.path", when.ENV), ("reference.model", when.OTHER_REFERENCE)}
    teachers = ("reference.teachers", "reference.teacher_weights", "reference.engine")
    met |= {(key, each) for key in teachers for each in (when.COMPARED, when.OTHER_REFERENCE)}
    assert {(key, each.words_at("")) for key, each in expected - seen - met} == set()


@pytest.fixture(scope="module")
def sft(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, set[str]]:
    text = sft_yaml(make_task(tmp_path_factory.mktemp("sft")), **SAVED | SHORT)
    return text, used_by(text)


def test_the_code_that_checks_keys_is_where_it_is_looked_for():
    assert all((Path(hotseat.__file__).parent / each).exists() for each in NOT_USERS)


def test_every_other_value_is_valid():
    wrong = {}
    for key, info in fields_of(Config):
        _, problems = validate(with_key({}, key, other_value(key, info)))
        wrong |= {problem.key: problem.message for problem in problems}
    assert not wrong


def test_every_key_is_named_in_sft(sft):
    assert unnamed_keys(*sft) == []


def test_a_key_that_nothing_names_is_found(sft):
    """As if the schema had forgotten for which tasks it is."""

    def forgetful(document: Document) -> tuple[Config, list[Problem]]:
        config, problems = check(document)
        return config, [problem for problem in problems if problem.key != "algorithm.turn_credit"]

    assert unnamed_keys(*sft, forgetful) == ["algorithm.turn_credit"]


@pytest.mark.parametrize(
    ("make", "sections"), [(rl_yaml, {}), (rm_yaml, PAIRS), (dpo_yaml, PAIRS)], ids=["rl", "rm", "dpo"]
)
def test_every_key_is_named_in(task, make, sections):
    text = make(task, **SAVED | sections)
    assert unnamed_keys(text, used_by(text)) == []


# Keys that matter only beside others: where those are set, they are used.
@pytest.mark.long
@pytest.mark.parametrize("kind", ["ppo", "agent", "simulator", "ahead", "evaluated", "adapters"])
def test_every_key_is_named_in_a_run_with(task, kind):
    (task / "agent.py").write_text(AGENT)
    env = f"{{path: {WALK}, tasks: [left, right], num_envs: 8, bins: 4, max_steps: 6, num_seeds: 4, eval_seeds: 1}}"
    lora = "{dtype: fp32, batch_size: 16, micro_batch_size: 8, lora: {rank: 2}, ema: {enabled: true}}"
    text = {
        "ppo": lambda: ppo_yaml(task, reward=f"{{model: {make_value_model(task / 'rm')}}}", **SAVED),
        "agent": lambda: rl_yaml(task, agent=f"{{path: {task}/agent.py}}", reward="", **SAVED),
        "simulator": lambda: rl_yaml(
            task, env=env, data="{max_length: 32}", reward="", rollout="{batch_size: 4, samples_per_prompt: 4}", **SAVED
        ),
        "ahead": lambda: rl_yaml(
            task,
            overlap="{staleness: 1}",
            cluster="{runtime: local, inventory: 1x2, component_placement: {actor: 0, rollout: 1}}",
            **SAVED,
        ),
        "evaluated": lambda: rl_yaml(task, eval=f"{{path: {task}/prompts.jsonl}}", **SAVED),
        "adapters": lambda: rl_yaml(task, train=lora, algorithm="{filtering: {enabled: true, high: 9}}", **SAVED),
    }[kind]()
    assert unnamed_keys(text, used_by(text)) == []


def test_no_key_that_acts_after_sampling_is_read_to_sample(task):
    watch = Watch()
    config = watch.over(loads(rl_yaml(task)))
    host_settings(config, task)
    engine_settings(config, (1,), task)
    rollout_sampling(config)
    group_filter(config, ())
    leaves = {key for key, _ in fields_of(Config)} & watch.keys
    assert "rollout.temperature" in leaves
    assert {key for key in leaves if acts_after_sampling(key)} == set()
