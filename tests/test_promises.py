"""What is not built yet is said where people look, and the pages name only what is there."""

import re
import tomllib
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt
from pages import DOCUMENTS

from hotseat.cli.main import main, make_parser
from hotseat.cli.options_view import options
from hotseat.config.changes import may_change
from hotseat.config.conflicts import missing
from hotseat.config.load import valid_keys
from hotseat.config.schema import Config
from hotseat.config.unsupported import UNSUPPORTED
from hotseat.openrlhf.flags import COMMANDS

ROOT = Path(__file__).parent.parent
PLANS = ROOT / "examples" / "plans"
PAGES = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")]
PAGES += DOCUMENTS
PAGES += sorted((ROOT / "examples").rglob("*.md"))
# Words by which a paragraph says that something is not there.
NOT_THERE = re.compile(r"not (built|run|part)|no effect|\| not yet \|")


def test_the_readme_lists_everything_that_is_not_built():
    [row] = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| not yet |")]
    assert not [what for what in UNSUPPORTED.values() if what not in row]


def test_openrlhfs_page_lists_every_flag_that_is_not_built():
    page = (ROOT / "docs" / "openrlhf.md").read_text()
    [listed] = [part for part in page.split("\n\n") if part.startswith("Not built yet")]
    for flags in COMMANDS.values():
        for flag in flags:
            if any(key in UNSUPPORTED for key in flag.sets):
                assert flag.name in listed, flag.name


def test_options_mark_everything_that_is_not_built():
    marked = {option["key"] for option in options("") if option["unsupported"]}
    assert marked == set(UNSUPPORTED)


def test_no_error_recommends_what_is_not_built():
    said = " ".join(message for _, message in missing(Config()))
    assert "reward.function" in said
    assert not [key for key in UNSUPPORTED if "." in key and key in said]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_mention_unbuilt_options_only_to_say_so(page):
    for part in re.split(r"\n\n|\n(?=[|-])", page.read_text()):
        named = [key for key in re.findall(r"`([a-z_]+\.[a-z_.0-9]+)(?::[^`]*)?`", part) if key in UNSUPPORTED]
        assert not named or NOT_THERE.search(part) or part.startswith("| `--"), part


def test_plans_and_configs_of_what_is_not_built_say_so(capsys):
    assert main(["config", str(PLANS / "async_6_plus_2.yaml"), "use_modelscope=true"]) == 0
    assert "this run cannot start yet: use_modelscope: not part of this version: ModelScope" in (
        capsys.readouterr().err
    )
    assert main(["plan", str(PLANS / "hybrid_engine_8.yaml")]) == 0
    assert "cannot start" not in capsys.readouterr().err


# --- pages and packaging ----------------------------------------------------------------------------------------------


def rendered(page: Path) -> str:
    return str(MarkdownIt("commonmark").enable("table").render(page.read_text()))


def anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    titles = re.findall(r"<h\d>(.*?)</h\d>", rendered(page))
    plain = (re.sub(r"<[^>]+>", "", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    for link in re.findall(r'(?:href|src)="([^"]+)"', rendered(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path) if path else page
        assert target.exists() or target.parent.name == "reference", link  # pages that `make docs` makes
        assert not anchor or anchor in anchors(target), link


def test_pages_that_texts_mention_are_there():
    """In code, comments and messages, and in pages without a link."""
    sources = [*PAGES, *(ROOT / "hotseat").rglob("*.py"), *(ROOT / "examples").rglob("*.yaml")]
    dead = [
        (str(source.relative_to(ROOT)), page)
        for source in sources
        for page in re.findall(r"\bdocs/[\w/.-]+\.md\b", source.read_text())
        if not (ROOT / page).is_file()
    ]
    assert not dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_pages_name_are_there(page):
    named = re.findall(r"`((?:bench|docs|examples|hotseat|scripts|tests)/[\w./-]+)`", page.read_text())
    assert not [path for path in named if not (ROOT / path).exists()]


def test_commands_that_pages_name_are_there():
    commands = set(make_parser()._subparsers._group_actions[0].choices)
    for page in PAGES:
        named = re.findall(r"(?:^|`)hotseat ([a-z][a-z-]+)\b", page.read_text(), re.MULTILINE)
        assert not set(named) - commands, page


def test_the_readme_says_what_has_not_run():
    assert "Nothing has run on several GPUs yet" in (ROOT / "README.md").read_text()


def test_the_long_description_renders():
    html = rendered(ROOT / "README.md")
    assert html.count("<table>") >= 2
    assert html.count("<h2>") >= 4
    assert "```" not in html  # every block of code has an end


def test_the_package_describes_itself():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (ROOT / project["readme"]).is_file()
    assert "GRPO" in project["keywords"]
    assert "Programming Language :: Python :: 3.11" in project["classifiers"]
    for script in project["scripts"].values():
        module, _, function = script.partition(":")
        assert callable(getattr(import_module(module), function))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_allow_only_changes_that_need_it(page):
    """An `--allow-change` that allows nothing is refused, so a command of a page with one would not run."""
    free = [key for _, keys in may_change() for key in keys]
    for key in re.findall(r"--allow-change ([a-z_][a-z_.]*)", page.read_text()):
        assert any(each == key or each.startswith(f"{key}.") for each in valid_keys()), key
        assert not any(key == each or key.startswith(f"{each}.") for each in free), key


def test_messages_of_the_troubleshooting_page_are_messages():
    named = re.findall(r'^\| "(.+?)" \|', (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    sources = "\n".join(path.read_text() for path in (ROOT / "hotseat").rglob("*.py"))
    assert named
    assert not [message for message in named if message not in sources]


def test_options_that_pages_name_are_there():
    keys = set(valid_keys())
    sections = {key.split(".")[0] for key in keys if "." in key} - {"run"}  # in Python pages, a run's object
    file = re.compile(r"\.(jsonl?|py|ya?ml|md|txt)$")
    others = {"rlinf.md", "verl.md", "trl.md"}  # name the keys of other frameworks
    wrong = []
    for page in (page for page in DOCUMENTS if page.name not in others):
        for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:[:=] ?[^`]*)?`", page.read_text()):
            is_option = key.split(".")[0] in sections and not file.search(key)
            if is_option and not any(f"{each}.".startswith(f"{key}.") or key.startswith(f"{each}.") for each in keys):
                wrong.append((page.name, key))
    assert not wrong
