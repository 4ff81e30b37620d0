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

    _check_callbacks(callbacks)
    objects = ScriptObjects(tokenizer)
    named = named_run(checked_config(config, overrides, keywords, objects))
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


def _check_callbacks(callbacks: Any) -> None:
    from hotseat.errors import UserError
    from hotseat.script.callbacks import Callback

    each = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    wrong = [value for value in each if not isinstance(value, Callback)]
    if wrong or not isinstance(callbacks, list | tuple):
        shown = repr(callbacks if not wrong else wrong[0])
        raise UserError(f"callbacks: given {shown}, must be a list of objects whose classes inherit from Callback")


def checked_config(
    config: Source | Config, overrides: Sequence[str], keywords: Mapping[str, Any], objects: ScriptObjects
) -> Config:
    """Return the config with the keys for which keywords stand. Raises for a key that it has already."""
    from hotseat.config.load import keys_in, loads
    from hotseat.errors import ConfigError, Problem

    text, file = _text_of(config, objects)
    present = keys_in(text, overrides, file)
    added, problems = [], []
    for name, value in keywords.items():
        if value is not None:
            override = objects.override(_KEYWORDS[name], value)
            key = override.partition("=")[0]
            added.append(override)
            if not present.isdisjoint({key, _KEYWORDS[name]}):
                problems.append(Problem(key, f"set in the config and by {name}=: give one of them"))
    if problems:
        raise ConfigError(problems)
    # All at once: options of the config may have an effect only with what a keyword stands for.
    return loads(text, [*overrides, *added], file)


def _text_of(config: Source | Config, objects: ScriptObjects) -> tuple[str, str | None]:
    """Return the text of a config, and the file that it is from."""
    from hotseat.config import Config, to_yaml
    from hotseat.config.load import text_of

    if isinstance(config, str) and ("\n" in config or ": " in config):
        return config, None
    if isinstance(config, str | Path):
        return text_of(config), str(config)
    if isinstance(config, Config):
        return to_yaml(config), None
    import yaml

    return yaml.safe_dump(objects.replace(config), sort_keys=False), None
