import pytest
from cli_inputs import rows


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "data.csv").write_text(rows(), encoding="utf-8")
    (tmp_path / "bounds.toml").write_text("a = [-1, 1]\nb = [-1, 1]\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path
