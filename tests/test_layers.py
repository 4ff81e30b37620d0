"""Imports point downward only, siblings do not import each other, and each outside system has one home."""

import ast
import functools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from hotseat import extensions

PACKAGE = Path(__file__).parent.parent / "hotseat"

# From the top. Folders in one row are siblings.
LAYERS = (
    ("__main__",),
    ("openrlhf", "rlinf", "trl", "verl"),
    ("cli", "api"),
    ("script",),
    ("demo",),
    ("loop",),
    ("checks",),
    ("rollout", "train", "weights", "cluster"),
    ("agents", "envs", "rewards", "data", "observe", "planning"),
    ("algorithms", "placement"),
    (
        "registry",
        "config",
        "connections",
        "types",
        "errors",
        "deaths",
        "failed",
        "faults",
        "openmp",
        "determinism",
        "clock",
        "closing",
        "interrupts",
        "words",
        "caches",
        "files",
        "machine",
        "model_source",
        "numeric",
        "object_store",
        "processes",
        "shim_package",
        "vision",
        "cuda_ipc",
        "user_functions",
        "extensions",
    ),
)
LEVEL = {folder: level for level, row in enumerate(LAYERS) for folder in row}

# Ground may lean on ground: the config raises our errors, in our words.
ALLOWED_SIBLINGS = {
    ("config", "errors"),
    ("types", "errors"),
    ("deaths", "errors"),
    ("types", "failed"),
    ("faults", "errors"),
    ("files", "errors"),
    ("config", "words"),
    ("config", "model_source"),
    ("config", "registry"),
    ("registry", "errors"),
    ("registry", "user_functions"),
    ("vision", "errors"),
    ("model_source", "errors"),
    ("model_source", "numeric"),
    ("numeric", "model_source"),
    ("object_store", "errors"),
    ("object_store", "files"),
    ("object_store", "words"),
    ("user_functions", "errors"),
}

# Folders with what users of other frameworks bring along. Nothing below imports them: `extensions` has the names by
# which the core finds what it needs. Only the commands that users type call them.
FRAMEWORKS = ("openrlhf", "rlinf", "trl", "verl")
ENTRIES = {
    "__init__.py",  # the public name `from_trl`
    *(f"cli/{name}.py" for name in ("train_ppo_ray", "train_sft", "train_rm", "train_dpo")),
    *(f"cli/{name}.py" for name in ("batch_inference", "lora_combiner", "serve_rm", "main_ppo")),
}

# Outside system -> folders, or files, that may import it.
HOMES = {
    "ray": ("cluster/on_ray/",),
    "vllm": ("rollout/",),
    "deepspeed": ("train/",),
    "trl": (),
}
NO_CONFIG = ("algorithms", "placement")

# Files inside of a folder, from the top. Files in one row do not import each other. A name that starts with "@" is
# everything in a folder.
ROWS_OF = {
    "cluster": (
        ("__init__",),
        ("doctor",),
        ("cluster",),
        ("@on_ray", "local"),
        ("runtime",),
        ("group",),
        ("worker_process", "session"),
        ("sighting",),
        ("node_facts",),
        ("device_memory",),
        ("activity", "environment", "lease", "links", "ports", "refs"),
    ),
    "openrlhf": (
        ("__init__",),
        ("inference_command", "merge_command", "run_command", "serve_command"),
        ("help", "translate"),
        ("derive",),
        ("config_draft",),
        ("argv",),
        ("flags",),
        ("flag",),
        ("@agents",),
        ("@shim", "helpers", "metric_aliases"),
    ),
    "openrlhf/agents": (
        ("__init__",),
        ("executor", "stand_in"),
        ("episodes",),
        ("agent_turns",),
        ("sampling_params",),
    ),
    "verl": (
        ("__init__",),
        ("@shim",),
        ("verl_command",),
        ("command_help", "to_config", "data_sources"),
        ("key_values",),
        ("overrides",),
        ("verl_keys",),
        ("reward_form", "scores"),
    ),
    "rlinf": (
        ("@shim",),
        ("__init__",),
        ("actor", "config_command", "embodied"),
        ("config_fragments", "rlinf_worker"),
        ("channel",),
        ("worker_group",),
        ("rlinf_cluster", "rlinf_placement", "rank_rows"),
        ("configs",),
        ("config_keys", "failures", "keys", "queues"),
        ("work",),
        ("broker",),
        ("@device_items",),
        ("broker_process",),
        ("bounded_queue",),
        ("wire",),
    ),
    "rlinf/device_items": (
        ("__init__",),
        ("pickling",),
        ("keeper",),
        ("cuda",),
    ),
    "trl": (
        ("__init__",),
        ("from_config",),
        ("peft_config",),
        ("conversions",),
        ("trl_fields",),
    ),
    "cluster/on_ray": (
        ("__init__",),
        ("ray_runtime",),
        ("launching", "node_processes"),
        ("ray_group", "reservation"),
        ("connection", "daemons", "relays"),
        ("template",),
        ("forked", "template_process", "lean_agent"),
        ("library", "waiting"),
    ),
}


# Inside of `loop`, from the top: files and folders.
ROOMS = (
    ("start",),
    ("run", "offline"),
    ("rl", "supervised", "serving"),
    ("opening",),
    ("inputs",),
    ("settings",),
    ("steering",),
    ("state",),
    ("workers",),
    ("devices",),
)
# `start` is imported early and is light; `run`, which is heavy, asks it for the view.
ROOMS_ALLOWED = {("run", "start")}


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
            is_ours = (node.module or "").split(".")[0] == "hotseat"
            found |= {f"{node.module}.{alias.name}" for alias in node.names if is_ours}
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
        if there in FRAMEWORKS and path.relative_to(PACKAGE).as_posix() in ENTRIES:
            continue
        if LEVEL[there] <= LEVEL[here]:
            found.append(f"{path.relative_to(PACKAGE)} imports {name}: {here} is not above {there}")
        if here in NO_CONFIG and there == "config":
            found.append(f"{path.relative_to(PACKAGE)} imports {name}: the maths knows no config")
    return found


def row_violations(folder: str, rows: tuple[tuple[str, ...], ...]) -> list[str]:
    """Imports inside of a folder that do not point to a lower row."""
    level = {name.removeprefix("@"): number for number, row in enumerate(rows) for name in row}
    prefix = f"hotseat.{folder.replace('/', '.')}"
    found = []
    for path in sorted((PACKAGE / folder).rglob("*.py")):
        here = path.relative_to(PACKAGE / folder).parts[0].removesuffix(".py")
        for name in sorted(imports_of(path)):
            if not name.startswith(f"{prefix}."):
                continue
            there = name.removeprefix(f"{prefix}.").split(".")[0]
            there = there if there in level else "__init__"  # a name that the folder itself exports
            if there != here and level[there] <= level[here]:
                found.append(f"{path.relative_to(PACKAGE)} imports {name}: {here} is not above {there}")
    return found


@pytest.mark.parametrize("folder", ROWS_OF)
def test_imports_inside_of_a_folder_point_downward_only(folder):
    assert not row_violations(folder, ROWS_OF[folder])


@pytest.mark.parametrize("folder", ROWS_OF)
def test_every_file_of_a_folder_has_a_row_and_every_row_names_files_that_exist(folder):
    named = {name for row in ROWS_OF[folder] for name in row}
    files = {path.stem for path in (PACKAGE / folder).glob("*.py")}
    folders = {f"@{path.parent.name}" for path in (PACKAGE / folder).glob("*/__init__.py")}
    assert named == files | folders


def test_every_name_in_the_tables_of_layers_exists():
    names = [*LEVEL, *(home for homes in HOMES.values() for home in homes), *NO_CONFIG, *ROWS_OF]
    assert not [name for name in names if not ((PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file())]


def test_the_check_sees_a_circle_inside_of_a_folder(tmp_path, monkeypatch):
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "group.py").write_text("from hotseat.cluster.cluster import Cluster\n")
    (tmp_path / "cluster" / "cluster.py").write_text("from hotseat.cluster.group import WorkerGroup\n")
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / "cluster" / "refs.py").write_text("from hotseat.cluster import WorkerGroup, group\n")
    assert row_violations("cluster", (("__init__",), ("cluster",), ("group",), ("refs",))) == [
        "cluster/group.py imports hotseat.cluster.cluster: group is not above cluster",
        "cluster/group.py imports hotseat.cluster.cluster.Cluster: group is not above cluster",
        "cluster/refs.py imports hotseat.cluster.WorkerGroup: refs is not above __init__",
        "cluster/refs.py imports hotseat.cluster.group: refs is not above group",
    ]


def bound_names(path: Path) -> set[str]:
    """Names that a module binds, and the modules beside it if it is a package's own."""
    names = {each.stem for each in path.parent.iterdir()} if path.name == "__init__.py" else set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)  # of names that a package loads when they are used
    return names


@pytest.mark.parametrize("folder", ["bench", "docs", "examples", "scripts"])
def test_what_programs_beside_the_package_import_is_there(folder):
    """Most of them are run by hand, on machines with GPUs."""
    lacking = []
    for path in sorted((PACKAGE.parent / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = (node.module or "").split(".") if isinstance(node, ast.ImportFrom) else [""]
            if parts[0] == PACKAGE.name:
                place = PACKAGE.parent.joinpath(*parts)
                file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
                there = bound_names(file) if file.is_file() else set()
                lacking += [
                    f"{path.name}: {node.module}.{alias.name}" for alias in node.names if alias.name not in there
                ]
    assert not lacking


def test_no_two_test_files_are_one_module():
    """pytest imports files of folders that are no packages by their names alone, and stops at the second."""
    files = Path(__file__).parent.rglob("test_*.py")
    names = Counter(path.name for path in files if not (path.parent / "__init__.py").exists())
    assert [name for name, count in names.items() if count > 1] == []


def test_every_module_belongs_to_a_layer():
    strangers = {unit_of(path) for path in modules()} - set(LEVEL) - {"__init__"}
    assert not strangers


@pytest.mark.slow
def test_imports_point_downward_only():
    assert not [line for path in modules() for line in violations(path)]


def test_rooms_of_the_loop_exist_and_import_downward_only():
    level = {room: number for number, row in enumerate(ROOMS) for room in row}
    loop = PACKAGE / "loop"
    there = {path.stem for path in loop.iterdir() if path.stem != "__init__" and not path.name.startswith("__")}
    assert there == set(level)
    wrong = []
    for path in sorted(loop.rglob("*.py")):
        here = path.relative_to(loop).parts[0].removesuffix(".py")
        for name in imports_of(path) if here != "__init__" else ():
            parts = name.split(".")
            if parts[:2] != ["hotseat", "loop"] or len(parts) < 3 or parts[2] == here or parts[2] not in level:
                continue
            if level[parts[2]] <= level[here] and (here, parts[2]) not in ROOMS_ALLOWED:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}: {here} is not above {parts[2]}")
    assert not wrong


def test_the_check_sees_an_upward_import(tmp_path, monkeypatch):
    (tmp_path / "algorithms").mkdir()
    wrong = tmp_path / "algorithms" / "wrong.py"
    wrong.write_text("def f():\n    from hotseat.loop import run\n")
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    assert {line.split(": ")[1] for line in violations(wrong)} == {"algorithms is not above loop"}


def test_the_core_imports_no_folder_of_another_framework():
    core = [path for path in modules() if unit_of(path) not in FRAMEWORKS]
    prefixes = tuple(f"hotseat.{folder}" for folder in FRAMEWORKS)
    importers = {
        path.relative_to(PACKAGE).as_posix()
        for path in core
        if any(f"{name}.".startswith(tuple(f"{prefix}." for prefix in prefixes)) for name in imports_of(path))
    }
    assert importers == ENTRIES


def test_the_core_finds_what_it_needs_of_other_frameworks_by_name():
    names = [extensions.METRIC_NAMES, *(entry.form for entry in extensions.AGENT_FORMS)]
    assert all(extensions.load(name) is not None for name in names)
    files = [*extensions.REWARD_HELPERS, *extensions.REWARD_FUNCTIONS.values()]
    files += [form.file for form in extensions.REWARD_FORMS]
    assert all((PACKAGE / file).is_file() for file in files)


@pytest.mark.parametrize("system", HOMES)
def test_each_outside_system_has_one_home(system):
    for path in modules():
        if any(name.split(".")[0] == system for name in imports_of(path)):
            where = path.relative_to(PACKAGE).as_posix()
            assert where.startswith(HOMES[system]), f"{where} imports {system}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        "hotseat.config",
        "hotseat.errors",
        "hotseat.placement",
        "hotseat.planning.advisor",
        "hotseat.rewards",
        "hotseat.checks.pipeline",
        "hotseat.cli.main",
    ],
)
def test_pure_modules_load_without_torch_or_ray(module):
    code = f"import sys, {module}; print(sorted({{'torch', 'ray', 'transformers'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.stdout.strip() == "[]", result.stderr
