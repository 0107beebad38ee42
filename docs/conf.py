"""The site: `make site` builds it from these pages, which stay plain Markdown.

The menu is the list of links in index.md, so that a code host shows the same list.
"""

import json
import re
import shutil
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util.logging import getLogger

DOCS = Path(__file__).parent
ROOT = DOCS.parent
REPOSITORY = "https://github.com/org/cookiecutter-pytorch-training"
LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)")
log = getLogger(__name__)

project = "cookiecutter-pytorch-training"
version = release = json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))["_template_version"]
extensions = ["myst_parser"]
exclude_patterns = ["requirements.txt"]
# Headings get the anchors that a code host gives them.
myst_heading_anchors = 4
# Otherwise --name would get a dash in place of two hyphens.
smartquotes = False
html_theme = "furo"
html_title = "PyTorch training template"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "monokai"
html_static_path = ["site"]
html_css_files = ["site.css"]
html_theme_options = {
    "source_repository": REPOSITORY,
    "source_branch": "main",
    "source_directory": "docs/",
    "top_of_page_buttons": ["view"],
}


def read_source(app: Sphinx, page: str, source: list[str]) -> None:
    """Turn the lists of index.md into menus, and links to other files into addresses."""
    if page == "index":
        source[0] += menus(source[0])

    def to_address(link: re.Match[str]) -> str:
        """The address of a file outside of docs/; a warning ends the build if it is gone."""
        path = (DOCS / page).parent.joinpath(link[2]).resolve()
        if path.is_relative_to(DOCS):
            return link[0]
        if not path.exists():
            log.warning("%s: %s does not exist", page, link[2])
        kind = "tree" if path.is_dir() else "blob"
        return f"{link[1]}{REPOSITORY}/{kind}/v{version}/{path.relative_to(ROOT)}"

    source[0] = LINK.sub(to_address, source[0])


def menus(index: str) -> str:
    """A hidden menu for each heading of index.md, of the pages that are listed below it."""
    found = []
    for section in index.split("\n## ")[1:]:
        caption, _, text = section.partition("\n")
        pages = re.findall(r"^- \[([^]]+)\]\(([^)]+)\.md\)", text, re.MULTILINE)
        entries = [f"{title} <{path}>" for title, path in pages]
        head = ["```{toctree}", ":hidden:", f":caption: {caption}", ""]
        found += ["", *head, *entries, "```", ""]
    return "\n".join(found)


def copy_pictures(app: Sphinx, error: Exception | None) -> None:
    """Copy the pictures that a page shows by HTML, which Sphinx does not follow."""
    if error is None and app.builder.format == "html":
        shutil.copytree(DOCS / "images", Path(app.outdir, "images"), dirs_exist_ok=True)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", read_source)
    app.connect("build-finished", copy_pictures)
