"""Hotseat from Python: `hotseat.run` does what `hotseat run` does, with objects where a config has paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotseat.config import Config
    from hotseat.loop.steering import Steering
    from hotseat.script.callbacks import Callback
    from hotseat.script.live_run import LiveRun
    from hotseat.script.objects import ScriptObjects

Source = str | Path | Mapping[str, Any]
_KEYWORDS = {
    "train": "data.path",
    "eval": "eval.path",
    "reward": "reward.function",
    "agent": "agent.path",
    "model": "actor.model",
}


def run(
    config: Source | Config = {},  # noqa: B006 (nothing changes it)
    *overrides: str,
    train: Any = None,
    eval: Any = None,
    reward: Any = None,
    agent: Any = None,
    model: Any = None,
    tokenizer: Any = None,
    callbacks: Sequence[Callback] = (),
) -> LiveRun:
    """Train to the end, and return the run.

    config: path of a YAML file, YAML text (a string with a line break or a colon and a space), a mapping of the same
    keys, or a `Config`. overrides: `key=value` with dotted keys, as on the command line.

    A mapping may have objects where a file has paths, and so may the keywords, which stand for these keys: `train` for
    data.path, `eval` for eval.path, `reward` for reward.function, `agent` for agent.path, `model` for actor.model.
    Several rewards are a list of functions, or of pairs of a function and its weight. docs/python.md lists what fits.
    tokenizer: instead of the model's. callbacks: called between steps.

    A config that cannot work raises a `UserError` before any model loads; a run that fails raises another
    `HotseatError`. Called in the main thread, it hears Ctrl-C and SIGTERM until it returns: the first one lets the
    current step finish and saves it, then KeyboardInterrupt is raised, with a note on what is lost and how to resume; a
    second one raises it at once.
    """
    objects = {"train": train, "eval": eval, "reward": reward, "agent": agent, "model": model}
    live, train_it = _made(config, overrides, objects, tokenizer, callbacks)
    return live.train(train_it)


def start(
    config: Source | Config = {},  # noqa: B006 (nothing changes it)
    *overrides: str,
    train: Any = None,
    eval: Any = None,
    reward: Any = None,
    agent: Any = None,
    model: Any = None,
    tokenizer: Any = None,
    callbacks: Sequence[Callback] = (),
) -> LiveRun:
    """Start a run in a thread of this process, and return its handle at once. The arguments are those of `run`.

    `for metrics in run:` yields the metrics of each step, `run.wait()` returns at the end, `run.stop()` ends the run
    after its step. Signals are the program's own. The run ends with the program: wait for it.
    """
    objects = {"train": train, "eval": eval, "reward": reward, "agent": agent, "model": model}
    live, train_it = _made(config, overrides, objects, tokenizer, callbacks)
    return live.begin(train_it)


def _made(
    config: Source | Config,
    overrides: tuple[str, ...],
    keywords: Mapping[str, Any],
    tokenizer: Any,
    callbacks: Sequence[Callback],
) -> tuple[LiveRun, Callable[[Config, Steering], object]]:
    """Check a config, and return the handle of its run with a function that trains it."""
    from hotseat.openmp import wait_passively

    wait_passively()
    from hotseat.config import loads, to_yaml
    from hotseat.loop.state.run_dir import named_run
    from hotseat.script.live_run import LiveRun
    from hotseat.script.objects import ScriptObjects

    objects = ScriptObjects(tokenizer)
    checked = _checked(config, [*overrides, *_overrides(keywords, objects)], objects)
    named = named_run(checked)
    if objects:
        place = objects.place(Path(named.run_dir) / str(named.name))
        placed = loads(place(to_yaml(named)))
        model = objects.model_of(named)
        actor = placed.actor.model_copy(update={"model": model and place(model)})
        named = placed.model_copy(update={"actor": actor})

    def train(config: Config, steering: Steering) -> None:
        from hotseat.loop.start import start

        with objects.written():
            start(config, steering=steering)

    return LiveRun(named, objects, callbacks), train


def _overrides(keywords: Mapping[str, Any], objects: ScriptObjects) -> list[str]:
    return [objects.override(_KEYWORDS[name], value) for name, value in keywords.items() if value is not None]


def _checked(config: Source | Config, overrides: Sequence[str], objects: ScriptObjects) -> Config:
    from hotseat.config import Config, load, loads, to_yaml

    if isinstance(config, str) and ("\n" in config or ": " in config):
        return loads(config, overrides)
    if isinstance(config, str | Path):
        return load(config, overrides)
    if isinstance(config, Config):
        return loads(to_yaml(config), overrides)
    import yaml

    return loads(yaml.safe_dump(objects.replace(config), sort_keys=False), overrides)
