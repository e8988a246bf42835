"""Docstrings become reStructuredText without losing or changing a sign of a formula."""

import doctest
import importlib.util

import pytest
from doc_pages import ROOT

spec = importlib.util.spec_from_file_location("docstrings", ROOT / "docs" / "_ext" / "docstrings.py")
docstrings = importlib.util.module_from_spec(spec)
spec.loader.exec_module(docstrings)


def converted(text: str) -> list[str]:
    return [line for line in docstrings.converted(text.splitlines()) if line]


def test_its_own_examples():
    assert doctest.testmod(docstrings).failed == 0


def test_an_equation_stays_letter_for_letter():
    lines = converted("Where\n\n    h = |x_j|^2 *e*,   `r` = 1\n\nholds.")
    assert lines == ["Where", "::", "       h = |x_j|^2 *e*,   `r` = 1", "holds."]


def test_arguments_become_a_list_two_in_a_line_as_well():
    lines = converted("Args:\n  a, b_c: alpha.   d: delta,\n    long; > 0.\nReturns: (d,).")
    assert lines == [
        ":Args:",
        r"   * **a**, **b\_c**: alpha.",
        "   * **d**: delta, long; > 0.",
        ":Returns: (d,).",
    ]


def test_an_example_is_code_where_no_blank_line_stands_before_it():
    assert converted("One.\n>>> 1 + 1\n2") == ["One.", ".. code-block:: pycon", "   >>> 1 + 1", "   2"]


@pytest.mark.parametrize("text", ["1. floor of", "- eta", "(a) first", ".. x", "* y"])
def test_a_paragraph_that_looks_like_a_list_is_none(text):
    line = converted(text + "\nmore")[0]
    assert line.startswith("\\ ") or line == "* eta more"
