"""The tables of engines and backends, and an engine that is added to them from outside."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from loop_cases import make_task, rl_yaml

import hotseat
from hotseat.config import loads
from hotseat.config.load import check
from hotseat.errors import ConfigError, UserError
from hotseat.loop.start import start
from hotseat.registry.backends import BACKENDS, backend_entry
from hotseat.registry.engines import ENGINES, EngineEntry, engine_entry
from hotseat.registry.table import load
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


DUMMY = EngineEntry("dummy", "Dummy", "For this test.", f"{__name__}:DummyKind", options=frozenset({"num_slots"}))


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
        config = loads(rl_yaml(tmp_path, name=engine, rollout=rollout.format(engine)))
        start(config)
        weights.append((tmp_path / "runs" / engine / "model" / "model.safetensors").read_bytes())
    assert [settings.engine for settings in MADE] == ["dummy"]
    assert weights[0] == weights[1]


def test_an_added_engine_is_checked_by_its_entry(tmp_path, dummy):
    text = rl_yaml(make_task(tmp_path), rollout="{engine: dummy, prefix_caching: true}")
    with pytest.raises(ConfigError, match=r"rollout.engine is dummy; this is for vllm"):
        check(loads(text))
    with pytest.raises(ConfigError, match=r"'dumy', must be one of transformers, vllm, dummy; did you mean dummy\?"):
        loads(text.replace("engine: dummy", "engine: dumy"))


def test_a_name_that_no_table_has_is_an_error_with_the_nearest_one():
    with pytest.raises(
        UserError, match=r"no rollout engine 'vlm': choose one of transformers, vllm; did you mean vllm"
    ):
        engine_entry("vlm")
    with pytest.raises(UserError, match=r"no training backend 'x': choose one of fsdp, deepspeed$"):
        backend_entry("x")


def test_entries_are_under_their_names_and_what_they_point_to_exists():
    assert all(name == entry.name for table in (ENGINES, BACKENDS) for name, entry in table.items())
    assert all(issubclass(load(entry.kind), EngineKind) for entry in ENGINES.values())
    assert all(load(entry.backend).name == name for name, entry in BACKENDS.items())


# Where engines and backends may be named: where they are implemented, and where others' flags are translated.
HOMES = ("registry/", "rollout/", "train/", "cli/openrlhf/", "config/rlinf.py", "rlinf/")
# What is called so otherwise: a cache's folder, and the library.
OTHERWISE = {"caches.py": {"vllm"}, "loop/start.py": {"transformers"}}


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
    assert replace(DUMMY, instead={"num_slots": "has one"}).without("num_slots") == "dummy, which has one"
