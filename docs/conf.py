"""The documentation site: Sphinx and MyST, built without a network and read without one."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import noisecast

project = "Noisecast"
author = "the Noisecast authors"
copyright = "the Noisecast authors, Apache-2.0"
version = release = noisecast.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "docstrings", "public_names"]
exclude_patterns = ["_build"]
nitpicky = False  # plain text in backticks names many things that are no object of ours

html_theme = "furo"
html_title = "Noisecast"
html_static_path = ["_static"]
html_css_files = ["noisecast.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"footer_icons": []}
pygments_style, pygments_dark_style = "friendly", "monokai"

myst_heading_anchors = 3
highlight_language = "none"  # an equation in a docstring is no Python

# Equations are text, as in the docstrings: a page needs no script from elsewhere. Quotes and dashes stay as typed.
smartquotes = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings have shapes, units and ranges
autodoc_preserve_defaults = True
add_module_names = False
python_maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"
