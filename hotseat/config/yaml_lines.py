"""YAML reader that returns plain values and the line of every key.

The loader departs from PyYAML's YAML 1.1 where that surprises people who write configs: `1:0` stays a string instead of
becoming 60, `1e-6` is a number instead of a string, `010` is ten instead of eight, and a key given twice is a problem
instead of the last one winning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from hotseat.errors import ConfigError, Problem


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's numbers."""


_KEPT_TAGS = {"tag:yaml.org,2002:bool", "tag:yaml.org,2002:null", "tag:yaml.org,2002:merge"}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag in _KEPT_TAGS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes text which our loader would take for a number."""


_INT = re.compile(r"^[-+]?[0-9]+$")  # no base but ten: `0x4` is a selection of devices, not four
_FLOAT = re.compile(
    r"""^(?: [-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?
          | [-+]?[0-9]+[eE][-+]?[0-9]+
          | [-+]?\.(?:inf|Inf|INF) | \.(?:nan|NaN|NAN) )$""",
    re.X,
)
for _each in (_Loader, _Dumper):
    _each.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(rf"^(?:{_INT.pattern})$"), list("-+0123456789"))
    _each.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(rf"^{_FLOAT.pattern}$", re.X), list("-+.0123456789")
    )


def _int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(str(loader.construct_scalar(node)))


def _float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(str(loader.construct_scalar(node)).lower().replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_constructor("tag:yaml.org,2002:int", _int)
_Loader.add_constructor("tag:yaml.org,2002:float", _float)

KeyPath = tuple[str | int, ...]


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree


def dotted(path: KeyPath) -> str:
    """Format `("cluster", "node_groups", 0, "label")` as `cluster.node_groups[0].label`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


@dataclass
class Document:
    """Values of one config file, with the line of each."""

    values: dict[str, Any] = field(default_factory=dict)
    file: str | None = None
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    origins: dict[KeyPath, str] = field(default_factory=dict)  # source of each key that is not from the file

    def problem(self, path: KeyPath, message: str) -> Problem:
        """Make a problem for a key, with the line of the key or of the nearest section around it."""
        for depth in range(len(path), 0, -1):
            if path[:depth] in self.origins:
                return Problem(dotted(path), message, file=self.origins[path[:depth]])
        if path not in self.lines:  # a section that only an override has made
            for overridden, origin in self.origins.items():
                if overridden[: len(path)] == path:
                    return Problem(dotted(path), message, file=origin)
        at = path
        while at and at not in self.lines:
            at = at[:-1]
        return Problem(dotted(path), message, file=self.file, line=self.lines.get(at))


def read_yaml(text: str, file: str | None = None) -> Document:
    """Parse a config. Text that is not YAML raises ConfigError; keys given twice are collected as problems."""
    document = Document(file=file)
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is None:
            return document
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError([Problem("", "a config is a mapping of keys to values", file=file, line=1)])
        document.values = _build(node, (), document, _Loader(""))
    except yaml.YAMLError as error:
        raise ConfigError([Problem("", f"not YAML: {_reason(error)}", file=file, line=_line(error))]) from None
    except RecursionError:
        raise ConfigError([Problem("", "not a config: it is nested without end", file=file)]) from None
    return document


def parse_value(text: str) -> Any:
    """Parse one value as in a file: `1e-6` is a number, `[1, 2]` a list, `0-7` and `@actor` are text."""
    if text.startswith("@"):  # reserved in YAML: a selection is quoted in a file, but not on a command line
        return text
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(_reason(error)) from None


def dump(values: dict[str, Any]) -> str:
    """Format values as YAML that reads back as the same values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=110)


def _reason(error: yaml.YAMLError) -> str:
    return str(getattr(error, "problem", None) or getattr(error, "reason", None) or error)


def _line(error: yaml.YAMLError) -> int | None:
    mark = getattr(error, "problem_mark", None)
    return mark.line + 1 if mark is not None else None


def _build(node: yaml.Node, path: KeyPath, document: Document, loader: _Loader) -> Any:
    if isinstance(node, yaml.MappingNode):
        _note_twice(node, path, document, loader)
        loader.flatten_mapping(node)  # merged keys come first, so that a mapping's own replace them
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(loader.construct_object(key_node, deep=True))
            here = (*path, key)
            document.lines[here] = key_node.start_mark.line + 1
            values[key] = _build(value_node, here, document, loader)
        return values
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            document.lines[(*path, index)] = item.start_mark.line + 1
        return [_build(item, (*path, index), document, loader) for index, item in enumerate(node.value)]
    return loader.construct_object(node, deep=True)


def _note_twice(node: yaml.MappingNode, path: KeyPath, document: Document, loader: _Loader) -> None:
    first: dict[str, int] = {}
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key, line = str(loader.construct_object(key_node, deep=True)), key_node.start_mark.line + 1
        if key in first:
            message = f"given twice, first on line {first[key]}"
            document.problems.append(Problem(dotted((*path, key)), message, file=document.file, line=line))
        first.setdefault(key, line)
