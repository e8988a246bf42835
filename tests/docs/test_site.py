"""The documentation site: built with warnings as errors, readable without a network, no link that leads nowhere."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from doc_pages import ROOT

import noisecast
from noisecast import theory

THEORY_PAGES = ("gradients", "optimizers", "quadratics", "choice", "closures")
FETCHED = {
    "script": "src",
    "link": "href",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
}

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("sphinx", "myst_parser", "furo")),
    reason="the site needs Sphinx, MyST and furo: pip install 'noisecast[docs]'",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    # A proxy that leads nowhere: a build that asks the network for anything fails.
    nowhere = {f"{scheme}_proxy": "http://127.0.0.1:9" for scheme in ("http", "https")}
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", str(folder / "trees")]
    built = subprocess.run(
        [*command, str(ROOT / "docs"), str(folder / "html")],
        capture_output=True,
        text=True,
        env={**os.environ, **nowhere},
    )
    assert built.returncode == 0, built.stderr
    return folder / "html"


class Html(HTMLParser):
    """What a page fetches, where it links, and the anchors that it has."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.anchors |= {attributes[name] for name in ("id", "name") if name in attributes}
        if tag in FETCHED and FETCHED[tag] in attributes:
            self.fetched.append(attributes[FETCHED[tag]])
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])


def is_elsewhere(address: str) -> bool:
    return re.match(r"(https?:)?//", address) is not None


def dead_links(folder: Path) -> Iterator[str]:
    pages = {path.resolve(): Html(path) for path in folder.rglob("*.html")}
    for path, page in pages.items():
        for link in [*page.links, *page.fetched]:
            if is_elsewhere(link) or link.startswith(("mailto:", "data:")):
                continue
            file, _, anchor = link.partition("#")
            target = (path.parent / unquote(file.partition("?")[0])).resolve() if file else path
            if not target.exists():
                yield f"{path.name}: {link}: no such file"
            elif anchor and target in pages and unquote(anchor) not in pages[target].anchors:
                yield f"{path.name}: {link}: no such anchor"


def foreign(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*.html"):
        yield from (f"{path.name}: {address}" for address in Html(path).fetched if is_elsewhere(address))
    for path in folder.rglob("*.css"):
        imports = re.findall(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')\s]+)", path.read_text(encoding="utf-8"))
        yield from (f"{path.name}: {address}" for address in imports)


def test_a_page_fetches_nothing_from_elsewhere(site):
    assert list(foreign(site)) == []


def test_every_link_within_the_site_leads_somewhere(site):
    assert list(dead_links(site)) == []


def test_a_foreign_script_and_a_dead_link_are_seen(tmp_path):
    (tmp_path / "page.html").write_text(
        '<script src="https://cdn.example/x.js"></script><a href="none.html">x</a><a href="#no">y</a><a href="#p">z</a>'
        '<p id="p">',
        encoding="utf-8",
    )
    (tmp_path / "style.css").write_text("@font-face {src: url('https://fonts.example/f.woff')}", encoding="utf-8")
    assert len(list(foreign(tmp_path))) == 2
    assert len(list(dead_links(tmp_path))) == 2


def test_every_public_name_is_on_the_api_page(site):
    anchors = Html(site / "api.html").anchors
    missing = [name for name in noisecast.__all__ if name != "__version__" and f"noisecast.{name}" not in anchors]
    assert not missing


def test_every_public_function_of_theory_is_on_a_theory_page(site):
    anchors = {a.split(".")[-1] for page in THEORY_PAGES for a in Html(site / "theory" / f"{page}.html").anchors}
    modules = {"dp_adam", "dp_sgd", "dp_sign_sgd"}
    names = {*theory.__all__, *(name for m in modules for name in public_functions(getattr(theory, m)))}
    assert names - modules - anchors == set()


def public_functions(module) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
    ]


def test_every_function_that_a_page_names_is_a_link(site):
    # A name that is misspelt stays plain text; Sphinx says nothing.
    unresolved = []
    for path in site.rglob("*.html"):
        if path.name not in ("genindex.html", "search.html", "py-modindex.html"):
            text = path.read_text(encoding="utf-8")
            unresolved += [f"{path.name}: {name}" for name in re.findall(UNRESOLVED, text)]
    assert not unresolved


# A reference by {py:func} and the like that found its target stands inside an <a>; what Python's domain leaves
# unresolved has the same code element without one. (`py-obj` is a name in backticks of a docstring: any word.)
UNRESOLVED = r'(?<!>)<code class="xref py py-(?:func|class|mod|meth)[^>]*><span class="pre">([^<]*)'
