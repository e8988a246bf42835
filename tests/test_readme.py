"""Every Python block of the README and of docs/forecast.md runs, and so does every command of the latter."""

import re
import shlex
from pathlib import Path

import pytest

from noisecast.cli import main

ROOT = Path(__file__).parents[1]


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


BLOCKS = [(page, block) for page in ("README.md", "docs/forecast.md") for block in blocks(page, "python")]
COMMANDS = [line for block in blocks("docs/forecast.md", "sh") for line in block.splitlines()]
SLOW = ("--best", "--seeds")  # many forecasts, many trainings


@pytest.mark.parametrize("page, block", BLOCKS, ids=range(len(BLOCKS)))
def test_block_runs(page, block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, page, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=[pytest.mark.slow] if any(option in c for option in SLOW) else []) for c in COMMANDS],
)
def test_command_runs(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    name, *arguments = shlex.split(command)
    assert name == "noisecast" and main(arguments) == 0


def test_the_commands_about_sweeps_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for block in blocks("docs/sweeps.md", "sh"):
        for command in block.splitlines():
            name, *arguments = shlex.split(command, comments=True)
            assert name == "noisecast" and main(arguments) == 0, command


def test_the_users_own_model_takes_fewer_than_fifteen_lines():
    block = next(block for _, block in BLOCKS if "equinox" in block)
    assert len([line for line in block.splitlines() if line.strip()]) < 15
