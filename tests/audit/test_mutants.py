"""The planted bugs of `python -m mutants` can be planted: their texts are in the sources, and their checks exist."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_bugs_text_is_in_the_sources_and_its_checks_exist(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from mutants.bugs import BUGS
    from mutants.run import CHECKS, check_texts

    check_texts()
    checks = (ROOT / CHECKS).read_text()
    assert {name for bug in BUGS for name in bug.seen_by if f"def {name}(" not in checks} == set()
