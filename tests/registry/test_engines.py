"""The tables of engines and backends, and an engine that is added to them from outside."""

import ast
from pathlib import Path
from typing import Any

import pytest
from loop_cases import make_task, rl_yaml

import hotseat
from hotseat.config import loads
from hotseat.config.annotations import tables_of
from hotseat.config.conflicts import no_effect
from hotseat.config.schema.reward_options import JudgeEngineConfig
from hotseat.config.schema.rollout_options import RolloutConfig
from hotseat.config.schema.section import Section
from hotseat.config.schema.train_options import TrainConfig
from hotseat.extensions import load
from hotseat.loop.start import start
from hotseat.registry.backends import BACKENDS
from hotseat.registry.engines import ENGINES, EngineEntry
from hotseat.rollout.kinds import EngineKind, EngineProcess, EngineSettings
from hotseat.rollout.transformers_engine import TransformersKind

PACKAGE = Path(hotseat.__file__).parent
MADE: list[EngineSettings] = []

# The engine of the test: this class and its entry are all that it takes.


class DummyKind(TransformersKind):
    """The transformers engine under another name."""

    def make(self, settings: EngineSettings, process: EngineProcess):
        MADE.append(settings)
        return super().make(settings, process)


DUMMY = EngineEntry("dummy", "Dummy", "Another.", f"{__name__}:DummyKind", options=frozenset({"num_slots"}))


@pytest.fixture
def dummy(monkeypatch):
    monkeypatch.setitem(ENGINES, "dummy", DUMMY)
    MADE.clear()


def test_an_engine_is_its_file_and_an_entry(tmp_path, dummy):
    """A run with it samples and trains what the engine below it would."""
    make_task(tmp_path)
    rollout = "{{engine: {}, batch_size: 4, samples_per_prompt: 4, max_new_tokens: 4, num_slots: 8}}"
    weights = []
    for engine in ("dummy", "transformers"):
        start(loads(rl_yaml(tmp_path, name=engine, rollout=rollout.format(engine))))
        weights.append((tmp_path / "runs" / engine / "model" / "model.safetensors").read_bytes())
    assert [settings.engine for settings in MADE] == ["dummy"]
    assert weights[0] == weights[1]


def test_an_added_engine_is_checked_by_its_entry(dummy):
    config = loads("rollout: {engine: dummy}")
    reason = "rollout.engine is dummy; this is for vllm"
    keys = ("rollout.prefix_caching", "rollout.num_slots")
    assert no_effect(config, keys) == [("rollout.prefix_caching", reason)]


@pytest.mark.parametrize(
    ("section", "option", "table"),
    [(RolloutConfig, "engine", ENGINES), (JudgeEngineConfig, "kind", ENGINES), (TrainConfig, "backend", BACKENDS)],
)
def test_the_schema_takes_the_names_of_the_table(section: type[Section], option: str, table: dict[str, Any]):
    assert tables_of(section.model_fields[option]) == [table]


def test_entries_are_under_their_names_and_what_they_point_to_exists():
    assert all(name == entry.name for table in (ENGINES, BACKENDS) for name, entry in table.items())
    assert all(issubclass(load(entry.kind), EngineKind) for entry in ENGINES.values())
    assert all(load(entry.backend).name == name for name, entry in BACKENDS.items())


# Where engines and backends may be named: where they are implemented, and where others' flags are translated.
HOMES = ("registry/", "rollout/", "train/", "openrlhf/", "rlinf/", "trl/", "verl/")
# What is called so otherwise: a cache's folder, and libraries; and what a command is about.
OTHERWISE = {
    "caches.py": {"vllm"},
    "checks/findings.py": {"transformers"},
    "checks/nodes.py": {"transformers"},
    "cli/cluster_runs.py": {"vllm", "deepspeed"},  # the runs that check a cluster
    "cluster/node_facts.py": {"deepspeed", "transformers", "vllm"},
    "loop/start.py": {"transformers"},
    "loop/state/hub_push.py": {"transformers"},
}


def names_in(source: str) -> set[str]:
    words = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
    return words & (ENGINES.keys() | BACKENDS.keys())


def test_no_other_file_names_an_engine_or_a_backend():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(HOMES):
            found[name] = names_in(path.read_text()) - OTHERWISE.get(name, set())
    assert not {name: words for name, words in found.items() if words}


def test_the_check_sees_a_name():
    assert names_in('is_sharded = config.train.backend == "deepspeed"') == {"deepspeed"}
