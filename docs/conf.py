"""The documentation site: ``make docs`` writes it to docs/_build. A warning is an error."""

import runpy
from pathlib import Path

from dssl.version import VERSION

HERE = Path(__file__).parent
runpy.run_path(str(HERE / "generate.py"), run_name="__main__")

project = "dssl"
author = "The dssl developers"
copyright = "2026, the dssl developers"
release = version = VERSION

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_design"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
smartquotes = False  # "--data" stays two hyphens
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 90
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "furo"
html_title = f"dssl {VERSION}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b5cad", "color-brand-content": "#0b5cad"},
    "dark_css_variables": {"color-brand-primary": "#7cb7ff", "color-brand-content": "#7cb7ff"},
}
