"""The site of the documentation: every page has a place in it, and it opens from disk without a network."""

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest
import reference_pages
from pages import DOCUMENTS, ROOT

from hotseat.config.load import valid_keys
from hotseat.registry.metric_names import HEADINGS, METRIC_NAMES, entry_of

DOCS = ROOT / "docs"


def test_every_page_has_a_place():
    listed = re.findall(r"^(?:.+<)?([\w/*-]+)>?$", (DOCS / "index.md").read_text(), re.MULTILINE)
    placed = {path for name in listed for path in DOCS.glob(f"{name}.md")}
    assert set(DOCUMENTS) - placed == {DOCS / "index.md"}


def test_generated_pages_have_everything(tmp_path):
    reference_pages.write(tmp_path)
    options, metrics, messages = ((tmp_path / f"{name}.md").read_text() for name in ("options", "metrics", "errors"))
    assert not [key for key in valid_keys() if f"`{key}`" not in options]
    assert all(f"## {heading}\n" in metrics for heading in HEADINGS)
    assert all(f"| `{name}` |" in metrics for name in METRIC_NAMES)
    assert "is in use by …, whose run is under way: wait for it, or choose another name" in messages
    assert "## hotseat run\n" in (tmp_path / "commands.md").read_text()


def test_a_family_of_metrics_has_one_entry():
    assert entry_of("memory/update/actor") is METRIC_NAMES["memory/PHASE/ROLE"]
    assert entry_of("eval/sums/pass@4") is METRIC_NAMES["eval/SET/NAME"]
    assert entry_of("engine_gap_lag_3") is METRIC_NAMES["engine_gap_lag_N"]
    assert entry_of("no/such/metric") is None
    assert entry_of("rewards") is None


@pytest.mark.long
@pytest.mark.skipif(find_spec("sphinx") is None, reason="`make docs` installs what the site is built with")
def test_the_site_opens_without_a_network(tmp_path):
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", str(DOCS), str(site)],
        check=True,
    )
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium")
    from playwright.sync_api import sync_playwright

    outside: list[str] = []
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = chromium.new_page()
        page.on("request", lambda request: outside.append(request.url))
        for path in sorted(site.rglob("*.html")):
            page.goto(path.as_uri())
        page.goto(f"{(site / 'search.html').as_uri()}?q=oversample")
        page.get_by_role("link", name="Options", exact=True).first.wait_for(timeout=60_000)
        chromium.close()
    assert not [url for url in outside if not url.startswith(("file:", "data:"))]
