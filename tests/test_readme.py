"""Every Python block of the README runs."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})


def test_the_users_own_model_takes_fewer_than_fifteen_lines():
    block = next(block for block in BLOCKS if "equinox" in block)
    assert len([line for line in block.splitlines() if line.strip()]) < 15
