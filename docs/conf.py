"""How Sphinx builds the site of the documentation: `make docs` writes it to docs/_build, and it opens from disk."""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS.parent / "scripts")]

import reference_pages  # noqa: E402

from hotseat import __version__  # noqa: E402

reference_pages.write(DOCS / "reference")

project = "Hotseat"
version = release = __version__
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]
html_theme = "furo"
html_title = "Hotseat"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False


def _name_files_outside(app: object, page: str, source: list[str]) -> None:
    """Replace links out of the documentation, which work in a checkout, by the path of what they lead to."""
    source[0] = re.sub(
        r"^(`{3,})(\w+) ([^\n]*\bfile=(\S+)[^\n]*)\n", r"\1{code-block} \2\n:caption: \4\n\n", source[0], flags=re.M
    )
    source[0] = re.sub(r"\[[\w./-]+\.md\]\(([^)\s]+\.md[^)\s]*)\)", r"[](\1)", source[0])
    source[0] = re.sub(r"\[([^\]]+)\]\((?:\.\./)+([^)#\s]+)[^)]*\)", _outside, source[0])


def _outside(found: re.Match[str]) -> str:
    if (DOCS / found[2]).exists():
        return found[0]  # a page in another folder of the documentation
    return f"`{found[2]}`" if found[1].strip("`") in found[2] else f"{found[1]} (`{found[2]}`)"


def setup(app: object) -> None:
    """Register what is done with each page before it is parsed."""
    app.connect("source-read", _name_files_outside)
