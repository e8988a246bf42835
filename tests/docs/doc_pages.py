"""The pages of the documentation as lists of fenced blocks, each with the note that stands above it.

A note is a comment on the line above a fence, and excuses the block from something, with a reason:

    <!-- not run: REASON -->   commands are only parsed; Python is only compiled
    <!-- slow: REASON -->      run by the slow tests alone
    <!-- varies: REASON -->    an output that is not compared
    <!-- needs: torch -->      run where these modules are installed
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTE = re.compile(r"<!-- (not run|slow|varies|needs): (.+) -->")

# Pages that carry no notes themselves: (page, beginning of the block): note.
NOTES_FROM_OUTSIDE = {
    ("README.md", "git clone"): ("not run", "sets up the repository"),
    ("README.md", "noisecast train reviews.csv"): ("not run", "a file of the reader's"),
    ("README.md", "noisecast forecast examples/forecast.toml"): ("not run", "docs/forecast.md runs the same"),
    ("README.md", "noisecast advise examples"): ("not run", "docs/advice.md and docs/advice-numbers.md run the same"),
    ("README.md", "noisecast sweep examples/sweep.toml"): ("not run", "docs/sweeps.md runs the same"),
    ("docs/report.md", "noisecast report sweep"): ("not run", "the tutorial reports on a store and a model of its own"),
}


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Args:
      page: relative to the repository.  line: of its fence.  language: as after the fence; "" without one.
      text: what is inside.  kind, reason: of its note; "" without one.
    """

    page: str
    line: int
    language: str
    text: str
    kind: str = ""
    reason: str = ""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_slow(self) -> bool:
        return self.kind == "slow"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[Block]:
    """Every fenced block of a page, whatever its language.

    Raises: ValueError where a fence is not closed, or a note excuses nothing.
    """
    found: list[Block] = []
    name, note, inside = name_of(page), None, None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if inside is not None:
            fence, start, language, lines, kept_note = inside
            if line.strip() == fence:
                found.append(_block(name, start, language, "\n".join(lines) + "\n", kept_note))
                inside = None
            else:
                lines.append(line)
        elif opening := re.match(r"\s*(`{3,})\s*(\S*)", line):
            inside, note = (opening[1], number, opening[2], [], note), None
        elif note is not None:
            raise ValueError(f"{name}:{number}: Expected a block right below its note '{note}'.")
        elif match := NOTE.fullmatch(line.strip()):
            note = (match[1], match[2])
    if inside is not None:
        raise ValueError(f"{name}:{inside[1]}: Expected the end of the block that begins here.")
    return found


def _block(name: str, line: int, language: str, text: str, note: tuple[str, str] | None) -> Block:
    for (page, beginning), outside in NOTES_FROM_OUTSIDE.items():
        if note is None and page == name and text.startswith(beginning):
            note = outside
    return Block(name, line, language, text, *(note or ("", "")))


def commands_of(block: Block) -> list[str]:
    """The command lines of a block, continued lines joined; of a transcript those after "$ "."""
    text = block.text.replace("\\\n", " ")
    if block.language == "text":
        return [line[2:] for line in text.splitlines() if line.startswith("$ ")]
    return [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
