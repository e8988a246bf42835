"""HTML that cannot be broken out of: text is escaped where it becomes a child, and only `Html` passes as it is.

The page loads nothing: its style and scripts are inline and named by their hashes in the content security policy, so
that nothing else runs, not even what a name from a file would smuggle in.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib.resources import files
from typing import Any

from noisecast.files import strict_json


class Html(str):
    """Markup that is safe already; made by `tag`."""


Child = Html | str | int | float | None
_VOID = {"meta", "link", "input", "br", "circle", "line", "path", "rect"}  # closed: of SVG the last four must be


def tag(element: str, /, *children: Child, **attributes: str | int | float | bool | None) -> Html:
    """One element. Attributes are named as in Python: `class_`, `data_x` for data-x; None and False are left out.

    >>> tag("p", "1 < 2", tag("b", "!"), class_="note")
    '<p class="note">1 &lt; 2<b>!</b></p>'
    >>> tag("line", x1=0)
    '<line x1="0"/>'
    """
    written = "".join(_attribute(*each) for each in attributes.items())
    inner = "".join(child if isinstance(child, Html) else escaped(child) for child in children if child is not None)
    return Html(f"<{element}{written}/>" if element in _VOID else f"<{element}{written}>{inner}</{element}>")


def joined(children: Any) -> Html:
    """Elements one after the other."""
    return Html("".join(child if isinstance(child, Html) else escaped(child) for child in children))


def escaped(text: Any) -> Html:
    """Text as HTML shows it, quotes included."""
    return Html(html.escape(str(text), quote=True))


def _attribute(name: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    # SVG has names with capitals and hyphens; Python's underscores become the hyphens.
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escaped(value)}"'


def json_for_script(content: Any) -> Html:
    r"""JSON that no browser takes for the end of its script element.

    >>> json_for_script({"name": "</script>"})
    '{"name":"\\u003c/script\\u003e"}'
    """
    # Through strict_json, so that infinities are strings; again without its spaces.
    text = json.dumps(json.loads(strict_json(content)), separators=(",", ":"), ensure_ascii=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Html(text)


def page(title: str, body: Html, data: Any, scripts: tuple[str, ...]) -> str:
    """The whole document: one file, which asks for nothing.

    Args:
      title: of the window.   body: of the document.   data: read by the scripts, as JSON.
      scripts: names of files in this folder, run in this order.
    """
    style, code = _asset("page.css"), "\n".join(_asset(name) for name in scripts)
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(code)}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    head = joined(
        [
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=policy),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("meta", name="generator", content=GENERATOR),
            tag("link", rel="icon", href="data:,"),  # else a browser asks a server for one
            tag("title", title),
            tag("style", Html(style)),
        ]
    )
    ending = joined(
        [
            tag("script", json_for_script(data), type="application/json", id="data"),
            tag("script", Html(code)),
        ]
    )
    document = tag("html", tag("head", head), tag("body", body, ending), lang="en")
    return f"<!doctype html>\n{document}\n"


GENERATOR = "noisecast report"


def is_report(text: str) -> bool:
    """Whether a file begins as `page` writes it."""
    return text.startswith("<!doctype html>") and f'content="{GENERATOR}"' in text[:2000]


def _asset(name: str) -> str:
    return files("noisecast.report").joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
