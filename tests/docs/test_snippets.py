"""Every block of the README and of the documentation runs, or says why not.

A page is run from top to bottom in a folder of its own: its Python blocks share one namespace, its commands run there,
a TOML block whose first line is `# NAME.toml` becomes that file, and an output is compared with what was printed.
"""

import contextlib
import importlib.util
import io
import re
import shlex
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from doc_pages import NOTES_FROM_OUTSIDE, PAGES, ROOT, Block, blocks_of, commands_of, name_of

from noisecast.cli import COMMANDS, app, main

LANGUAGES = {"python", "sh", "toml", "text", "", "{toctree}", "{eval-rst}", "{image}", "{figure}"}
RUNNABLE = {"python", "sh"}
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
SHELL = {"cat": lambda name: print(Path(name).read_text(encoding="utf-8"), end="")}


class Page:
    """What a page has done so far: names, files in the current folder, and the last output."""

    def __init__(self) -> None:
        self.names = {"__name__": "__main__"}
        self.printed: str | None = None  # None: nothing was run that an output could be compared with

    def run(self, block: Block) -> None:
        if block.language == "toml":
            self.keep(block)
        elif block.language == "text":
            self.compare(block)
        elif block.kind == "not run":
            self.printed = None
        elif block.language in RUNNABLE:
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                self.python(block) if block.language == "python" else self.shell(block)
            self.printed = output.getvalue()

    def python(self, block: Block) -> None:
        code = "\n" * block.line + block.text  # so that a traceback shows the page's own lines
        exec(compile(code, str(ROOT / block.page), "exec"), self.names)

    def shell(self, block: Block) -> None:
        for command in commands_of(block):
            name, *arguments = shlex.split(command, comments=True)
            if name == "noisecast":
                assert main(arguments) == 0, f"{block.place}: {command}"
            else:
                assert name in SHELL, f"{block.place}: only noisecast and {list(SHELL)} are run; mark it 'not run'"
                SHELL[name](*arguments)

    def keep(self, block: Block) -> None:
        if name := re.match(r"# (\S+\.toml)\b", block.text):
            Path(name[1]).write_text(block.text, encoding="utf-8")

    def compare(self, block: Block) -> None:
        if block.kind not in ("varies", "not run") and self.printed is not None:
            assert lines(block.text) == lines(self.printed), f"{block.place} is not what was printed"
        self.printed = None


def place(block: Block) -> str:
    return block.place


def lines(text: str) -> list[str]:
    """Without what no reader sees: blanks at the ends of lines, and blank lines around."""
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n").splitlines()


def run_page(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *, slow: bool) -> None:
    blocks = blocks_of(page)
    for block in blocks:
        missing = [m for m in block.reason.split(", ") if block.kind == "needs" and not importlib.util.find_spec(m)]
        if missing:
            pytest.skip(f"{block.place} needs {', '.join(missing)}")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    (folder / "examples").symlink_to(ROOT / "examples")
    done = Page()
    for block in blocks:
        if slow or not block.is_slow:
            done.run(block)
        else:
            done.printed = None


# Pages of many forecasts or trainings.
LONG = [ROOT / "docs" / f"{name}.md" for name in ("advice", "advice-numbers", "estimators", "forecast", "tutorial")]


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page in LONG)) for page in PAGES], ids=name_of
)
def test_page_runs(page, tmp_path, monkeypatch):
    if not any(b.language in RUNNABLE and b.kind != "not run" and not b.is_slow for b in blocks_of(page)):
        pytest.skip("nothing to run, or nothing quick")
    run_page(page, tmp_path, monkeypatch, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if any(b.is_slow for b in blocks_of(p))], ids=name_of)
def test_page_runs_with_its_slow_blocks(page, tmp_path, monkeypatch):
    run_page(page, tmp_path, monkeypatch, slow=True)


# --- What is not run is at least read ---------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [b for b in BLOCKS if commands_of(b) and b.language in ("sh", "text")], ids=place)
def test_commands_exist_and_take_their_options(block):
    for command in commands_of(block):
        words = shlex.split(command.split(" > ")[0], comments=True)
        if "noisecast" not in words[:2]:
            continue
        arguments = words[words.index("noisecast") + 1 :]
        assert arguments[0] in COMMANDS, f"{block.place}: no command {arguments[0]}"
        app.parse_args(arguments, print_error=False, exit_on_error=False)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python" and b.kind == "not run"], ids=place)
def test_python_that_is_not_run_compiles(block):
    compile(block.text, block.place, "exec")


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "toml"], ids=place)
def test_toml_is_toml(block):
    tomllib.loads(block.text)


# --- No block gets away -----------------------------------------------------------------------------------------------


def test_every_block_is_run_or_excused():
    unknown = [f"{b.place} ({b.language})" for b in BLOCKS if b.language not in LANGUAGES]
    assert not unknown, f"Nobody runs these blocks; their language is none of {sorted(LANGUAGES)}: {unknown}"
    runnable = [b for b in BLOCKS if b.language in RUNNABLE]
    fates = Counter(b.kind or "run" for b in runnable)
    print(dict(fates))
    assert sum(fates[kind] for kind in ("run", "slow", "needs", "not run")) == len(runnable), fates
    assert fates["run"] + fates["needs"] > fates["slow"] + fates["not run"], "More is excused than run"


def test_every_output_stands_below_what_prints_it_or_says_why_not():
    for page in PAGES:
        before: Block | None = None
        for block in blocks_of(page):
            if block.language == "text":
                is_compared = before is not None and before.language in RUNNABLE and before.kind != "not run"
                assert is_compared or block.kind, f"{block.place}: nothing runs that prints it; give the reason"
            before = block if block.language in (*RUNNABLE, "text") else before


def test_no_excuse_outlives_its_block():
    texts = [(b.page, b.text) for b in BLOCKS]
    for page, beginning in NOTES_FROM_OUTSIDE:
        assert any(p == page and text.startswith(beginning) for p, text in texts), (page, beginning)


def test_the_users_own_model_takes_fewer_than_fifteen_lines():
    block = next(b for b in BLOCKS if b.page == "README.md" and "equinox" in b.text)
    assert len([line for line in block.text.splitlines() if line.strip()]) < 15


# --- The tests of the test --------------------------------------------------------------------------------------------


@pytest.fixture
def run_text(tmp_path, monkeypatch):
    def run(text: str, *, slow: bool = False) -> None:
        page = tmp_path / "page.md"
        page.write_text(text, encoding="utf-8")
        monkeypatch.setattr("doc_pages.name_of", lambda page: page.name)
        folder = tmp_path / "folder"
        folder.mkdir()
        run_page(page, folder, monkeypatch, slow=slow)

    return run


def test_a_wrong_output_is_seen(run_text):
    with pytest.raises(AssertionError, match="not what was printed"):
        run_text("```python\nprint(1)\n```\n```text\n2\n```\n")


def test_a_broken_block_is_seen(run_text):
    with pytest.raises(ZeroDivisionError):
        run_text("```python\na = 0\n```\n\n```python\n1 / a\n```\n")


def test_a_slow_block_is_run_where_it_is_asked_for(run_text):
    with pytest.raises(ZeroDivisionError):
        run_text("<!-- slow: it takes long -->\n```python\n1 / 0\n```\n", slow=True)


def test_a_command_that_fails_is_seen(run_text):
    with pytest.raises(AssertionError, match="noisecast account"):
        run_text("```sh\nnoisecast account --target-delta 2\n```\n")


def test_a_note_without_a_block_is_seen(run_text):
    with pytest.raises(ValueError, match="right below"):
        run_text("<!-- slow: it takes long -->\n\n```python\n1\n```\n")
