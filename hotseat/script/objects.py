"""Objects of a script in the place of paths: they become files, which every process of the run can load.

    objects = ScriptObjects()
    values = objects.replace({"reward": {"function": f}})    # f becomes "PLACE/f.py:f"
    config = objects.placed(load(values))                    # which becomes "runs/.rl-1.python/f.py:f"
    with objects.written():                                  # while the files exist
        start(config)

A function or class is sent by cloudpickle: `f.py` loads `f.pkl` beside it. Data become JSON lines, or a saved data set.
The folder is beside that of the run, for this user alone, and goes with the call. In the run's folder stay the initial
model and `script.json`, with the source of each function.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import os
import shutil
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotseat.checks.run_directory import INITIAL_MODEL, LOCK
from hotseat.errors import ConfigError, Problem, UserError
from hotseat.extensions import AGENT_FORMS
from hotseat.files import write_whole
from hotseat.user_functions import SCRIPT_FOLDER

if TYPE_CHECKING:
    from hotseat.config import Config

RECORD = "script.json"  # in the run's folder
_PLACE = "SCRIPT_OBJECTS"  # the folder, until the run has a name
_LARGE = 256 * 2**20  # bytes of a function with all that it uses, from which on a note is made

_FUNCTION = "a function"
_AGENT = "a class of agents or environments, an Agent, or a function play"
_DATA = "a datasets.Dataset, a pandas.DataFrame, or rows as dicts in a list or another iterable with a length"

_AGENT_FUNCTIONS = ("play", *(name for form in AGENT_FORMS for name in form.functions))

# What a key may have instead of a path. Keys of mappings with names of the user's are matched by `*`.
KINDS = {
    "data.path": _DATA,
    "eval.path": _DATA,
    "eval.sets.*.path": _DATA,
    "reward.function": _FUNCTION,
    "reward.functions.*.function": _FUNCTION,
    "eval.reward": _FUNCTION,
    "agent.path": _AGENT,
    "actor.model": "a model of transformers",
    "algorithm.estimator": _FUNCTION,
    "algorithm.policy_loss": _FUNCTION,
    "data.sampler": _FUNCTION,
    "components.*.path": "a class",
}


@dataclass(frozen=True)
class _Object:
    """An object of the script, by the key of the config that has it. file: the name of its file, or folder."""

    key: str
    value: Any
    file: str
    name: str | None  # in the file, of a function or class

    @property
    def path(self) -> str:
        return f"{_PLACE}/{self.file}" + (f":{self.name}" if self.name else "")


@dataclass
class ScriptObjects:
    """Objects of one call of `hotseat.run`. folder: of their files, once the run has a name."""

    tokenizer: Any = None
    notes: list[str] = field(default_factory=list)
    _objects: list[_Object] = field(default_factory=list)
    _folder: Path | None = None
    _run: Path | None = None
    _model: str | None = None  # that the config names

    def __bool__(self) -> bool:
        return bool(self._objects) or self.tokenizer is not None

    def replace(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return a mapping of config keys in which every object has become a path, for now in a folder without a name.

        Raises `ConfigError` for objects that no key may have.
        """
        problems: list[Problem] = []
        replaced = self._replace(values, (), problems)
        if problems:
            raise ConfigError(problems)
        result: dict[str, Any] = replaced
        return result

    def override(self, key: str, value: Any) -> str:
        """Return the override that sets a key to the path which stands for an object, or to a path that it is already.

        Several rewards become `reward.functions`: each is a function, or a tuple of it, its weight and perhaps a name.
        """
        if key == "reward.function" and isinstance(value, list | tuple):
            names = ("function", "weight", "name")
            tuples = [each if isinstance(each, tuple) else (each,) for each in value]
            key, value = "reward.functions", [dict(zip(names, each, strict=False)) for each in tuples]
        problems: list[Problem] = []
        replaced = self._replace(value, tuple(key.split(".")), problems)
        if problems:
            raise ConfigError(problems)
        return f"{key}={json.dumps(replaced)}"

    def place(self, run_dir: Path) -> Callable[[str], str]:
        """Choose the folder of the files by that of the run; return a function that puts it into a config's text."""
        self._run = run_dir
        self._folder = run_dir.parent / SCRIPT_FOLDER.format(name=run_dir.name)
        folder, model = str(self._folder), str(run_dir / INITIAL_MODEL)
        return lambda text: text.replace(f"{_PLACE}/{INITIAL_MODEL}", model).replace(_PLACE, folder)

    def model_of(self, config: Config) -> str | None:
        """Return the model to start from: the initial one of the run's folder, if the script gave a tokenizer to it."""
        self._model = config.actor.model
        return self._model if self.tokenizer is None else f"{_PLACE}/{INITIAL_MODEL}"

    @contextmanager
    def written(self) -> Iterator[None]:
        """Have the files in the folder inside the context.

        Raises `ConfigError` for an object that cannot be sent, and `UserError` if another script uses the folder.
        """
        if not self:
            yield
            return
        assert self._folder is not None
        with _owned(self._folder):
            problems = [problem for each in self._objects for problem in self._write(each)]
            if problems:
                raise ConfigError(problems)
            if self.tokenizer is not None and not any(each.key == "actor.model" for each in self._objects):
                self._write_tokenizer()
            yield

    def record(self, run_dir: Path, say: Callable[[str], object]) -> None:
        """Write what the script gave into the run's folder, without the objects; say what differs from before."""
        if not self:
            return
        file = run_dir / RECORD
        objects = {each.key: _described(each) for each in self._objects}
        before = json.loads(file.read_text())["objects"] if file.is_file() else {}
        for key in objects.keys() & before.keys():
            if objects[key].get("sha256") != before[key].get("sha256"):
                say(f"{key}: {objects[key].get('name', 'the object')} of the script has changed since the run began")
        main = getattr(sys.modules.get("__main__"), "__file__", None)
        write_whole(file, json.dumps({"script": main, "objects": objects}, indent=1))

    # --- replacing ----------------------------------------------------------------------------------------------------

    def _replace(self, value: Any, path: tuple[str, ...], problems: list[Problem]) -> Any:
        key, kind = ".".join(path), _kind_of(path)
        if value is None or isinstance(value, str | bool | int | float):
            return value
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if kind is not None:
            name = _function_name(value) if kind is not _DATA and key != "actor.model" else None
            if kind is _AGENT and inspect.isfunction(value) and name not in _AGENT_FUNCTIONS:
                name = "play"
            if not _fits(kind, value):
                is_object = kind in (_AGENT, "a class") and not inspect.isroutine(value)
                hint = f": give the class {type(value).__name__} itself" if is_object else ""
                problems.append(Problem(key, f"given {_named(value)}, must be a path, or {kind}{hint}"))
                return None
            each = _Object(key, value, _file_of(key, kind, name, value, self._objects), name)
            self._objects.append(each)
            return each.path
        if isinstance(value, Mapping):
            return {str(name): self._replace(item, (*path, str(name)), problems) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._replace(item, (*path, str(at)), problems) for at, item in enumerate(value)]
        problems.append(Problem(key, f"given {_named(value)}, which is neither text nor a number, a list or a mapping"))
        return None

    # --- writing ------------------------------------------------------------------------------------------------------

    def _write(self, each: _Object) -> Iterator[Problem]:
        assert self._folder is not None
        assert self._run is not None
        path = self._folder / each.file
        try:
            if each.key == "actor.model":
                _save_model(each.value, self.tokenizer, self._run / INITIAL_MODEL)
            elif each.name is None:
                _write_data(each.value, path)
            else:
                size = _write_function(each.value, each.name, path)
                if size > _LARGE:
                    self.notes.append(
                        f"warning: {each.key}: {each.name} is {size / 2**20:,.0f} MiB with all that it uses, which each"
                        " of its processes loads"
                    )
        except (UserError, OSError, TypeError, ValueError) as error:
            yield Problem(each.key, str(error))

    def _write_tokenizer(self) -> None:
        """Make the initial model from the folder of a named one, with the script's tokenizer."""
        assert self._run is not None
        target = self._run / INITIAL_MODEL
        if target.exists():
            return
        source = Path(self._model or "").expanduser()
        if not source.is_dir():
            from huggingface_hub import snapshot_download

            source = Path(snapshot_download(str(self._model)))
        shutil.copytree(source, target, copy_function=_link_or_copy)
        self.tokenizer.save_pretrained(target)


def _kind_of(path: tuple[str, ...]) -> str | None:
    for key, kind in KINDS.items():
        parts = key.split(".")
        if len(parts) == len(path) and all(part in ("*", name) for part, name in zip(parts, path, strict=True)):
            return kind
    return None


def _fits(kind: str, value: Any) -> bool:
    if kind is _DATA:
        is_rows = isinstance(value, Sized) and isinstance(value, Iterable) and not isinstance(value, Mapping | bytes)
        return is_rows or hasattr(value, "column_names") or hasattr(value, "to_dict")
    if kind is KINDS["actor.model"]:
        return hasattr(value, "save_pretrained") and hasattr(value, "config")
    if kind == "a class":
        return inspect.isclass(value)
    return callable(value) or (kind is _AGENT and hasattr(value, "run"))


def _function_name(value: Any) -> str:
    """Return a name for a function, class or object in its file."""
    name = getattr(value, "__name__", None)
    if name is None:
        name = getattr(getattr(value, "func", None), "__name__", None) or type(value).__name__  # functools.partial
    return name if name.isidentifier() else "function"  # a lambda


def _file_of(key: str, kind: str, name: str | None, value: Any, others: Sequence[_Object]) -> str:
    if key == "actor.model":
        return INITIAL_MODEL
    if kind is _DATA:
        stem = {"data.path": "train", "eval.path": "eval"}.get(key) or f"eval_{key.split('.')[2]}"
        return stem if _is_data_set(value) and hasattr(value, "__len__") and not _is_plain(value) else f"{stem}.jsonl"
    taken = {each.file for each in others}
    numbered = itertools.chain([""], (f"_{number}" for number in itertools.count(2)))
    return next(file for suffix in numbered if (file := f"{name}{suffix}.py") not in taken)


def _named(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


@contextmanager
def _owned(folder: Path) -> Iterator[None]:
    """Make the folder anew, for this process alone, and remove it afterwards. What a killed script left is removed."""
    from hotseat.loop.state.run_dir import sole_owner

    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with sole_owner(folder):
        _empty(folder)
        try:
            yield
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != LOCK:
            entry.unlink()


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)


# --- functions and classes --------------------------------------------------------------------------------------------

_STUB = '''"""from {place}"""

# An object of the script that called hotseat.run, which shown_place names in messages.

import pickle
import sys
from pathlib import Path

sys.path += [folder for folder in {folders!r} if folder not in sys.path]

with Path(__file__).with_suffix(".pkl").open("rb") as _file:
    {name} = pickle.load(_file)
{more}'''
# An agent is a class of its file, of which each host makes one object.
_AS_CLASS = '''
_given = {name}


class {name}(_given):
    """Stands for the class of the script, which stays as it is."""
'''
_AS_OBJECT = '''
_given = {name}


class {name}(type(_given)):
    """Stands for the agent that the script made."""

    def __new__(cls):
        return _given

    def __init__(self):
        pass
'''


def _write_function(value: Any, name: str, path: Path) -> int:
    """Write a function or class, and a file that loads it; return the bytes it has with all that it uses."""
    data = _pickled(value, name)
    path.with_suffix(".pkl").write_bytes(data)
    more = ""
    if not inspect.isroutine(value) and not isinstance(value, type) and hasattr(value, "run"):
        more = _AS_OBJECT.format(name=name)
    elif isinstance(value, type):
        more = _AS_CLASS.format(name=name)
    folders = [os.path.abspath(folder or ".") for folder in sys.path]
    path.write_text(_STUB.format(place=_place_of(value), folders=folders, name=name, more=more))
    return len(data)


def _pickled(value: Any, name: str) -> bytes:
    import cloudpickle

    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:  # what an object's own methods raise
        raise UserError(
            f"{name} cannot be sent to other processes: {_culprit(value)}{type(error).__name__}: {error}. Make what it"
            " uses inside it, or at the top of a module that it imports"
        ) from error
    return data


def _culprit(value: Any) -> str:
    """Name the variable that a function uses and that cannot be sent; empty if it cannot be told."""
    import cloudpickle

    if not inspect.isfunction(value):
        return ""
    used = inspect.getclosurevars(value)
    for name, each in {**used.globals, **used.nonlocals}.items():
        try:
            cloudpickle.dumps(each)
        except Exception:  # which of them it is counts, not how it fails
            return f"it uses {name!r}, of type {_named(each)}. "
    return ""


# What inspect raises where it finds no source, or another text than the one that was run.
_NO_SOURCE = (OSError, TypeError, SyntaxError, tokenize.TokenError)


def _place_of(value: Any) -> str:
    """Return file and line of an object's source, as far as Python knows them."""
    code = inspect.unwrap(value) if inspect.isroutine(value) or isinstance(value, type) else type(value)
    try:
        file, line = inspect.getsourcefile(code), inspect.getsourcelines(code)[1]
    except _NO_SOURCE:
        return "the script"
    return f"{file}:{line}"


def _source_of(value: Any) -> str | None:
    try:
        return inspect.getsource(value if inspect.isroutine(value) or isinstance(value, type) else type(value))
    except _NO_SOURCE:
        return None  # typed into an interpreter


def _described(each: _Object) -> dict[str, Any]:
    """Describe an object for the run's record, with a digest of its source or rows, by which a change is seen."""
    if each.key == "actor.model":
        return {"kind": "model", "name": type(each.value).__name__}
    if each.name is None:
        rows = _rows_of(each.value)
        digest = hashlib.sha256()
        for row in rows:
            digest.update(repr(sorted(row.items(), key=lambda item: str(item[0]))).encode())
        return {"kind": "data", "rows": len(rows), "sha256": digest.hexdigest()}
    sources = _sources(each.value, {})
    digest_of_source = hashlib.sha256("\n".join(sources.values()).encode()).hexdigest() if sources else None
    module = getattr(each.value, "__module__", None)
    return {"kind": "code", "name": each.name, "module": module, "sources": sources, "sha256": digest_of_source}


def _sources(value: Any, seen: dict[str, str], name: str | None = None) -> dict[str, str]:
    """Return the sources of a function or class, of the script's functions that it uses, and digests of values."""
    name = str(name or getattr(value, "__qualname__", type(value).__qualname__))
    if name in seen:
        return seen
    if isinstance(value, str | int | float | bool | list | tuple | dict | set | None):
        # As a digest: a value may be a password, or large. Sets have no order.
        text = repr(sorted(map(repr, value)) if isinstance(value, set) else value)
        seen[name] = f"sha256 {hashlib.sha256(text.encode()).hexdigest()}"
        return seen
    source = _source_of(value)
    if source is None or "site-packages" in _place_of(value):
        return seen
    seen[name] = source
    if inspect.isfunction(value):
        used = inspect.getclosurevars(value)
        for other, each in sorted({**used.globals, **used.nonlocals}.items()):
            if not inspect.ismodule(each):
                _sources(each, seen, other)
    return seen


# --- data and models --------------------------------------------------------------------------------------------------


def _is_data_set(value: Any) -> bool:
    return hasattr(value, "save_to_disk")


def _rows_of(value: Any) -> Sequence[Mapping[str, Any]]:
    if _is_data_set(value):
        rows: Sequence[Mapping[str, Any]] = value
        return rows
    if hasattr(value, "to_dict") and hasattr(value, "columns"):
        return list(value.to_dict("records"))
    return list(value)


def _write_data(value: Any, path: Path) -> None:
    """Write rows as JSON lines; a data set with what JSON does not know, such as images, is saved as it is."""
    if hasattr(value, "keys") and not hasattr(value, "features") and _is_data_set(value):
        raise UserError(f"given data sets by name: give one of them, such as [{next(iter(value.keys()))!r}]")
    if not hasattr(value, "__len__"):
        raise UserError("a data set without a length cannot be read to its end: take a part of it, as a list")
    if _is_data_set(value) and not _is_plain(value):
        _save_quietly(value, path)
        return
    rows = _rows_of(value)
    if not len(rows):
        raise UserError("there are no rows")
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise UserError(f"row {number} is {_named(row)}, must be a dict of columns")
            try:
                file.write(json.dumps(dict(row), ensure_ascii=False, default=_as_json) + "\n")
            except TypeError as error:
                raise UserError(
                    f"row {number}: {error}; a datasets.Dataset may have dates, bytes, images and arrays"
                ) from None


def _is_plain(data_set: Any) -> bool:
    """Tell whether JSON knows all that a data set has, by its features and its first row."""
    if any(hasattr(feature, "decode_example") for feature in (getattr(data_set, "features", None) or {}).values()):
        return False
    try:
        json.dumps(data_set[0] if len(data_set) else {})
    except (TypeError, KeyError):
        return False
    return True


def _save_quietly(data_set: Any, path: Path) -> None:
    """Save a data set without the progress bars of `datasets`, which would stand between the lines of the run."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    were_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        data_set.save_to_disk(str(path))
    finally:
        if not were_disabled:
            enable_progress_bars()


def _as_json(value: Any) -> Any:
    """Convert numbers and arrays of numpy, which JSON does not know."""
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    raise TypeError(f"a column has {_named(value)}, which JSON does not know")


def _save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save the model and its tokenizer, unless the run's folder has them from an earlier start."""
    if (folder / "config.json").is_file():
        return
    if tokenizer is None:
        from transformers import AutoTokenizer

        name = getattr(model, "name_or_path", "")
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError):
            raise UserError(
                f"a model object needs its tokenizer, and {name!r} has none: give tokenizer=, too"
            ) from None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
