"""Loading: a YAML file and `key=value` overrides become a checked `Config`, or one error that lists every problem."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from hotseat.config import conflicts
from hotseat.config.annotations import words_of
from hotseat.config.component_names import as_written, with_roles
from hotseat.config.schema import Config
from hotseat.config.schema.data_options import EvaluationConfig
from hotseat.config.schema.section import FORMS, FunctionPath
from hotseat.config.yaml_lines import Document, KeyPath, dotted, dump, parse_value, read_yaml
from hotseat.errors import ConfigError, Problem

_SAVED = "# hotseat config, format "
_FORMAT = f"{_SAVED}3\n"  # changes when a default does


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a config file. Overrides are dotted `key=value`, values written as in the file."""
    return loads(text_of(path), overrides, file=str(path))


def text_of(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ConfigError([Problem("", f"cannot be read: {error.strerror}", file=str(path))]) from None
    except UnicodeDecodeError:
        raise ConfigError([Problem("", "is not a text file", file=str(path))]) from None


def loads(text: str, overrides: Sequence[str] = (), file: str | None = None, *, forget_idle: bool = False) -> Config:
    """Read a config's text, as `load` does. forget_idle: remove options that overrides have left without effect."""
    return _read(text, overrides, file, forget_idle=forget_idle)[0]


def loads_in_effect(text: str, overrides: Sequence[str] = ()) -> tuple[Config, list[tuple[str, str]]]:
    """Read a config's text without its options that have no effect, and return (key, reason) of each of them."""
    return _read(text, overrides, None, forget_idle=True)


def _read(
    text: str, overrides: Sequence[str], file: str | None, *, forget_idle: bool
) -> tuple[Config, list[tuple[str, str]]]:
    document = _read_document(text, overrides, file)
    _forget_evaluation(document)
    idle = _forget_idle(document) if forget_idle else []
    config, problems = check(document)
    if problems:
        raise ConfigError(sorted(problems, key=lambda problem: (problem.file != file, problem.line or 0)))
    return config, idle


def _read_document(text: str, overrides: Sequence[str], file: str | None) -> Document:
    document = read_yaml(text, file)
    for override in overrides:
        _apply_override(document, override)
    return document


def keys_in(text: str, overrides: Sequence[str] = (), file: str | None = None) -> set[str]:
    """Return the options that a config's text and overrides set, whether or not they can stay together."""
    return {dotted(path) for path in set_keys(_read_document(text, overrides, file).values)}


def check(document: Document) -> tuple[Config, list[Problem]]:
    """Return the config without its invalid entries, and all problems of the document."""
    config, problems = validate(document)
    keys = list(set_keys(document.values))
    bad = {problem.key for problem in problems}
    for key, because in conflicts.no_effect(config, (dotted(path) for path in keys)):
        if key not in bad:
            problems.append(document.problem(_path_of(key, keys), f"has no effect: {because}; remove it"))
            bad.add(key)
    problems += [
        document.problem(_path_of(key, keys), text) for key, text in conflicts.conflicts(config) if key not in bad
    ]
    return config, problems


def validate(document: Document) -> tuple[Config, list[Problem]]:
    """Check types, ranges and unknown keys. Invalid entries are left out, so that the rest can still be checked."""
    values, problems = with_roles(document.values), list(document.problems)
    left_out: set[KeyPath] = set()  # invalid entries, which are missing when the rest is checked
    while True:
        try:
            return Config.model_validate(values), problems
        except ValidationError as error:
            messages: dict[KeyPath, str] = {}
            for detail in error.errors():
                path = _key_path(values, detail["loc"], is_missing=detail["type"] == "missing")
                messages.setdefault(path, _explain(path, detail))
            # A value that may be a scalar or a section fails as both: keep the messages about the section's own keys.
            paths = [path for path in messages if not any(other[: len(path)] == path != other for other in messages)]
            new = [path for path in paths if path not in left_out]
            problems += [document.problem(as_written(document.values, path), messages[path]) for path in new]
            values = _without(values, paths)
            left_out.update(paths)


def to_yaml(config: Config) -> str:
    """Return the shortest YAML that loads as this config: only what differs from the defaults."""
    return dump(config.model_dump(mode="json", exclude_defaults=True))


def to_saved(config: Config) -> str:
    """Format the config as a run keeps it, in its directory and in its checkpoints.

    Its first line names the format: `to_yaml` leaves defaults out, so under others it would mean something else.
    """
    return _FORMAT + to_yaml(config)


def loads_saved(text: str, overrides: Sequence[str] = ()) -> Config:
    """Read what `to_saved` wrote, or a config without its first line.

    Options that overrides leave without effect are removed, since users cannot remove them from a saved file.
    """
    if text.startswith(_SAVED) and not text.startswith(_FORMAT):
        saved = text.partition("\n")[0].removeprefix("# ")
        raise ConfigError([Problem("", f"saved as {saved!r}: read it with the version of Hotseat that wrote it")])
    return loads(text, overrides, forget_idle=True)


def set_keys(values: Mapping[str, Any]) -> Iterator[KeyPath]:
    """Yield every option that a document sets: leaves, where mappings and lists of free content are one leaf.

    `null` where that is the default sets nothing.
    """
    known = _defaults()

    def walk(node: Mapping[str, Any], path: KeyPath) -> Iterator[KeyPath]:
        for key, value in node.items():
            here = (*path, key)
            if isinstance(value, Mapping) and dotted(here) not in known:
                yield from walk(value, here)
            elif value is not None or known.get(dotted(here), ...) is not None:
                yield here

    return walk(values, ())


def valid_keys() -> Iterator[str]:
    for key, _ in fields_of(Config):
        yield key


@cache
def fields_of(model: type[BaseModel], prefix: str = "") -> tuple[tuple[str, Any], ...]:
    """Return (dotted key, pydantic field) of every leaf of the tree."""
    fields: list[tuple[str, Any]] = []
    for name, info in model.model_fields.items():
        section = info.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            fields += fields_of(section, f"{prefix}{name}.")
        else:
            fields.append((prefix + name, info))
    return tuple(fields)


@cache
def _defaults() -> dict[str, Any]:
    return {key: info.default for key, info in fields_of(Config)}


def nearest_key(path: KeyPath) -> str:
    """Return `did you mean ...` for an unknown key: a sibling, the same name elsewhere, or its section's keys."""
    leaf = str(path[-1])
    _, section = _field_at(path[:-1])
    siblings = list(section.model_fields) if section else []
    close = difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.65)
    if close:
        return f"did you mean {dotted((*path[:-1], close[0]))}?"
    elsewhere = [known for known in valid_keys() if known.rpartition(".")[2] == leaf]
    close = difflib.get_close_matches(dotted(path), elsewhere, n=1, cutoff=0.0)
    if close:
        return f"did you mean {close[0]}?"
    return f"{dotted(path[:-1]) or 'the tree'} has: {', '.join(siblings)}"


def _nested(path: KeyPath, value: Any) -> str | None:
    """Return the hint for a key in which sections are joined by dots, as in overrides; None if it is no such."""
    split = tuple(name for part in path for name in (part.split(".") if isinstance(part, str) else [part]))
    if split == path:
        return None
    if dotted(split) not in set(valid_keys()):
        return f"in a file sections are nested, and {dotted(split)} is none either; {nearest_key(split)}"
    written = "..." if isinstance(value, Mapping | list) else _shown(value)
    for part in reversed(split[1:]):
        written = f"{{{part}: {written}}}"
    return f"in a file sections are nested: {split[0]}: {written}"


def _field_at(path: KeyPath) -> tuple[Any, type[BaseModel] | None]:
    """Return the field that a path leads to, through lists, mappings and unions, and the section that it holds."""
    section: type[BaseModel] | None = Config
    field: Any = None
    for part in path:
        if section is not None and part in section.model_fields:
            field = section.model_fields[str(part)]
            section = next(_sections_in(field.annotation), None)
    return field, section


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for member in typing.get_args(annotation):
        yield from _sections_in(member)


def _apply_override(document: Document, override: str) -> None:
    key, equals, text = override.partition("=")
    origin = f"override {override}"
    if not equals or not key:
        document.problems.append(Problem("", f"{override!r} is not key=value", file="command line"))
        return
    path = as_written(document.values, tuple(key.strip().split(".")))
    try:
        value = parse_value(text)
    except ValueError as error:
        document.problems.append(Problem(key, f"{text!r} is not a value: {error}; quote it", file=origin))
        return
    node = document.values
    for depth, part in enumerate(path[:-1], start=1):
        child = node.setdefault(str(part), {})
        if child is None:
            child = node[str(part)] = {}
        if not isinstance(child, dict):
            message = f"{dotted(path[:depth])} is a value, {_shown(child)}, and has no keys below it"
            document.problems.append(Problem(key, message, file=origin))
            return
        node = child
    is_section = any(each.startswith(f"{dotted(path)}.") for each in valid_keys())
    node[str(path[-1])] = {} if value is None and is_section else value  # `eval=null` unsets the whole section
    document.origins[path] = origin
    if path[-1] in ("micro_batch_size", "max_tokens_per_device"):
        node.pop("chosen_tokens_per_device", None)  # chosen by an earlier run, and replaced by this override


def _forget_evaluation(document: Document) -> None:
    """Remove the options that `eval.path: null` leaves without effect: it stands for no evaluation. Runs note it."""
    section = document.values.get("eval")
    if not isinstance(section, dict) or "path" not in section or section["path"] is not None:
        return
    for name in EvaluationConfig.model_fields.keys() & section.keys() - {"path"}:
        del section[name]
    checkpoint = document.values.get("checkpoint")
    if isinstance(checkpoint, dict):
        checkpoint.pop("best_metric", None)


def _forget_idle(document: Document) -> list[tuple[str, str]]:
    """Remove options that can have no effect from a document, unless an override has set them; return (key, reason)."""
    forgotten: list[tuple[str, str]] = []
    while True:
        config, _ = validate(document)
        paths = [path for path in set_keys(document.values) if path not in document.origins]
        idle = conflicts.no_effect(config, [dotted(path) for path in paths])
        if not idle:
            return forgotten
        forgotten += idle
        document.values = _without(document.values, [_path_of(key, paths) for key, _ in idle])


def _path_of(key: str, paths: Iterable[KeyPath]) -> KeyPath:
    return next((path for path in paths if dotted(path) == key), tuple(key.split(".")))


def _key_path(values: Any, loc: Sequence[str | int], is_missing: bool) -> KeyPath:
    """Return pydantic's location without the names of union members, which are no keys of the document."""
    path: list[str | int] = []
    node = values
    for part in loc:
        is_item = isinstance(node, list) and isinstance(part, int) and part < len(node)
        if is_item or (isinstance(node, Mapping) and part in node):
            node = node[part]
        elif is_missing and isinstance(node, Mapping) and part == loc[-1]:
            node = None
        else:
            continue
        path.append(part)
    return tuple(path)


def _without(values: Mapping[str, Any], paths: Iterable[KeyPath]) -> dict[str, Any]:
    """Copy the values without some entries. A list with an invalid item is left out as a whole."""
    tops = set()
    for path in paths:
        node: Any = values
        depth = 0
        while depth < len(path) and isinstance(node, Mapping) and path[depth] in node:
            node = node[path[depth]]
            depth += 1
        tops.add(path[:depth])

    def copy(node: Mapping[str, Any], here: KeyPath) -> dict[str, Any]:
        return {
            key: copy(value, (*here, key)) if isinstance(value, Mapping) else value
            for key, value in node.items()
            if (*here, key) not in tops
        }

    return copy(values, ())


_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping",
    "model": "a section",
}


def _explain(path: KeyPath, detail: Mapping[str, Any]) -> str:
    """Word one of pydantic's errors: the value that was given, and what would fit."""
    kind, value, context = str(detail["type"]), detail["input"], detail.get("ctx") or {}
    shown = f"given {_shown(value)}"
    field, _ = _field_at(path)
    allowed = words_of(field) if field is not None else []  # of the field, or of the mapping around an entry
    if kind == "extra_forbidden":
        return f"unknown key; {_nested(path, value) or nearest_key(path)}"
    if kind == "missing":
        return "must be given"
    if kind == "literal_error":
        close = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.6)
        own = ", or FILE.py:FUNCTION" if FunctionPath in typing.get_args(field.annotation) else ""
        return f"{shown}, must be one of {', '.join(allowed)}{own}" + (f"; did you mean {close[0]}?" if close else "")
    bounds = {"greater_than": ("gt", "above"), "greater_than_equal": ("ge", "at least")}
    bounds |= {"less_than": ("lt", "below"), "less_than_equal": ("le", "at most")}
    if kind in bounds:
        name, word = bounds[kind]
        return f"{shown}, must be {word} {context[name]}"
    if kind in ("too_long", "too_short"):
        return f"{shown}, must have {context.get('max_length', context.get('min_length'))} values"
    expected = FORMS[context["pattern"]] if kind == "string_pattern_mismatch" else _EXPECTED.get(kind.split("_")[0])
    words = [f" or {word}" for word in allowed]
    return f"{shown}, must be {expected}{''.join(words)}" if expected else f"{shown}: {detail['msg']}"


def _shown(value: Any) -> str:
    """Format a value as YAML writes it."""
    if value is None:
        return "nothing"
    return str(value).lower() if isinstance(value, bool) else repr(value)
