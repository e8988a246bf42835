"""A TOML file that an editor has saved with a byte-order mark is read as one without."""

import codecs
from pathlib import Path

import pytest
from cli_inputs import SCENARIO

from noisecast.cli.advise_numbers import read_numbers
from noisecast.problems.datasets import read_public_columns
from noisecast.scenario_file import read_scenario_file, read_sweep_file

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    "text, read",
    [
        (SCENARIO, lambda path: [each.id for each in read_scenario_file(path).scenarios]),
        (SCENARIO, lambda path: read_sweep_file(path).text),
        ((EXAMPLES / "advise_numbers.toml").read_text(encoding="utf-8"), lambda path: read_numbers(path)[1]),
        ("age = [0, 120]", read_public_columns),
    ],
    ids=["scenario", "sweep", "numbers", "bounds"],
)
def test_a_byte_order_mark_is_no_part_of_the_file(tmp_path, text, read):
    plain, marked = tmp_path / "plain.toml", tmp_path / "marked.toml"
    plain.write_bytes(text.encode())
    marked.write_bytes(codecs.BOM_UTF8 + text.encode())
    assert read(marked) == read(plain)
