"""Docstrings as they stand, made into reStructuredText: every formula a reader of the source sees, unchanged.

Our docstrings are plain text: `x_j^2` is no reference and `|x|` no substitution. So everything is escaped but code in
backticks; indented blocks (equations) and doctests are shown letter for letter; "Args:" and its like become fields.
"""

import re
from typing import Any

SECTION = re.compile(r"(Args(?:, Returns)?(?: and (?:Returns|Raises|metric))?|Returns|Raises|Valid when): ?(.*)")
ENTRY = re.compile(r"  (\S.*?): (.*)")  # "  name: text", indented by two
NEXT_ENTRY = re.compile(r"(?<=\S)  +(?=[a-z][\w, ]*: )")  # a second one in the same line
LOOKS_LIKE_A_LIST = re.compile(r"(\w+|#)[.)] |\(\w+\) |[-+*•|:>] ?|\.\. ")
SPECIAL = re.compile(r"([\\*`|_])")


def escaped(text: str) -> str:
    return SPECIAL.sub(r"\\\1", text)


def inline(text: str) -> str:
    """Text with code in single or double backticks; nothing else is markup.

    >>> print(inline("E|x_j|^2"))
    E\\|x\\_j\\|^2
    """
    parts = re.split(r"(``[^`]+``|`[^`]+`)", text)
    return "".join(_code(part) if part.startswith("`") else escaped(part) for part in parts)


def _code(span: str) -> str:
    code = span.strip("`")
    # What follows a literal directly, as in `s`^2, needs a separator.
    return f":py:obj:`{code}`\\ " if re.fullmatch(r"[A-Za-z_][\w.]*", code) else f"``{code}``\\ "


def paragraph(lines: list[str]) -> list[str]:
    text = " ".join(line.strip() for line in lines)
    guard = "\\ " if LOOKS_LIKE_A_LIST.match(text) else ""
    text = inline(text)
    return [guard + (text[:-1] + "\\:" if text.endswith("::") else text), ""]


def field(name: str, text: str) -> list[str]:
    return [f":{name}: {inline(text)}", ""]


def entries(lines: list[str]) -> list[str]:
    """The arguments, one bullet each."""
    found: list[list[str]] = []
    for line in lines:
        entry = ENTRY.fullmatch(line)
        if entry and not line.startswith("   "):
            found.append([entry[1], entry[2]])
        elif found:
            found[-1][1] += " " + line.strip()
        else:
            found.append(["", line.strip()])
    result = [":Args:"]
    for name, text in found:
        for i, part in enumerate(NEXT_ENTRY.split(text)):
            key, value = (name, part) if i == 0 else part.split(": ", 1)
            label = ", ".join(f"**{escaped(word.strip('`'))}**" for word in key.split(", ") if word)
            result.append(f"   * {label}{': ' if label else ''}{inline(value)}")
    return [*result, ""]


def blocks(lines: list[str]) -> list[list[str]]:
    """Cut at blank lines, and where a section begins."""
    cut: list[list[str]] = [[]]
    for line in lines:
        if not line.strip():
            cut.append([])
        elif SECTION.fullmatch(line) or (line.startswith(">>>") and cut[-1] and not _is_code(cut[-1])):
            cut.append([line])
        else:
            cut[-1].append(line)
    return [block for block in cut if block]


def _is_code(block: list[str]) -> bool:
    return block[0].startswith(">>>")


def converted(lines: list[str]) -> list[str]:
    """A docstring's lines as reStructuredText."""
    result: list[str] = []
    pending: list[list[str]] = blocks(lines)
    for block in pending:
        section = SECTION.fullmatch(block[0])
        if _is_code(block):
            result += [".. code-block:: pycon", "", *(f"   {line}" for line in block), ""]
        elif section and section[1] == "Args" and not section[2]:
            result += entries(block[1:])
        elif section:
            result += field(section[1], " ".join([section[2], *(line.strip() for line in block[1:])]))
        elif all(line.startswith("  ") for line in block):
            result += ["::", "", *(f"   {line}" for line in block), ""]
        elif block[0].startswith("- "):
            for item in re.split(r"\n(?=- )", "\n".join(block)):
                result.append("* " + inline(" ".join(part.strip() for part in item[2:].splitlines())))
            result.append("")
        else:
            # A paragraph that an equation ends without a blank line between.
            text = [line for line in block if not line.startswith("  ")]
            result += paragraph(text)
            rest = [line for line in block if line.startswith("  ")]
            result += ["::", "", *(f"   {line}" for line in rest), ""] if rest else []
    return result


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = converted(lines)


def setup(app: Any) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", process)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
