"""Imports point downward only, siblings do not import each other, and each outside system has one home."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "hotseat"

# From the top. Folders in one row are siblings.
LAYERS = (
    ("__main__",),
    ("cli", "api"),
    ("loop",),
    ("rollout", "train", "weights", "cluster"),
    ("agents", "rewards", "data", "observe"),
    ("algorithms", "placement"),
    ("config", "types", "errors", "faults", "openmp", "clock", "words"),
)
LEVEL = {folder: level for level, row in enumerate(LAYERS) for folder in row}

# Ground may lean on ground: the config raises our errors, in our words.
ALLOWED_SIBLINGS = {("config", "errors"), ("types", "errors"), ("faults", "errors"), ("config", "words")}

# Outside system -> folders, or files, that may import it.
HOMES = {
    "ray": ("cluster/",),
    "vllm": ("rollout/", "weights/vllm.py"),
    "deepspeed": ("train/",),
}
NO_CONFIG = ("algorithms", "placement")


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def unit_of(path: Path) -> str:
    """The folder, or ground file, that a module belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Full dotted names that a module imports, lazily or not."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "hotseat"}
    return found


def violations(path: Path) -> list[str]:
    here = unit_of(path)
    if here == "__init__":
        return []
    found = []
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] != "hotseat" or len(parts) < 2 or parts[1] not in LEVEL:
            continue
        there = parts[1]
        if there == here or (here, there) in ALLOWED_SIBLINGS:
            continue
        if LEVEL[there] <= LEVEL[here]:
            found.append(f"{path.relative_to(PACKAGE)} imports {name}: {here} is not above {there}")
        if here in NO_CONFIG and there == "config":
            found.append(f"{path.relative_to(PACKAGE)} imports {name}: the maths knows no config")
    return found


def test_every_module_belongs_to_a_layer():
    strangers = {unit_of(path) for path in modules()} - set(LEVEL) - {"__init__"}
    assert not strangers


def test_imports_point_downward_only():
    assert not [line for path in modules() for line in violations(path)]


def test_the_check_sees_an_upward_import(tmp_path, monkeypatch):
    (tmp_path / "algorithms").mkdir()
    wrong = tmp_path / "algorithms" / "wrong.py"
    wrong.write_text("def f():\n    from hotseat.loop import run\n")
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    assert len(violations(wrong)) == 1


@pytest.mark.parametrize("system", HOMES)
def test_each_outside_system_has_one_home(system):
    for path in modules():
        if any(name.split(".")[0] == system for name in imports_of(path)):
            where = path.relative_to(PACKAGE).as_posix()
            assert where.startswith(HOMES[system]), f"{where} imports {system}"


@pytest.mark.parametrize("module", ["hotseat.config", "hotseat.errors", "hotseat.placement", "hotseat.cli.main"])
def test_pure_modules_load_without_torch_or_ray(module):
    code = f"import sys, {module}; print(sorted({{'torch', 'ray', 'transformers'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]", result.stderr
