"""Sphinx configuration: `make docs`."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "tools"))
os.environ["MPLBACKEND"] = "agg"

from charts import draw_charts  # noqa: E402
from pages import substitutions  # noqa: E402
from pictures import draw_all  # noqa: E402
from reference import write_reference  # noqa: E402

import batchbayes as bb  # noqa: E402

project = "batchbayes"
version = release = bb.__version__
copyright = "the batchbayes authors"
language = "en-GB"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "docstrings",
    "executed",
]
exclude_patterns = ["_build", "_generated", "templates", "tools"]

html_theme = "furo"
html_title = f"batchbayes {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = [("versions.js", {"defer": "defer"})]
templates_path = ["templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "versions.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_math_renderer = "mathml"
html_copy_source = False
html_show_sphinx = False
html_use_index = html_domain_indices = False  # the index of the reference is by topic; the search finds names

myst_enable_extensions = ["dollarmath", "substitution", "deflist", "colon_fence"]
myst_heading_anchors = 3
myst_substitutions = substitutions(HERE)

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
suppress_warnings = ["myst.header"]  # pages of results are made by programs, and some begin with small headings
napoleon_use_rtype = False
python_maximum_signature_line_length = 100

write_reference(HERE / "api")
draw_all(HERE / "_generated")
draw_charts(HERE / "results", HERE / "_generated")
