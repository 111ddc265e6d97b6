"""How the documentation is built: `make docs`, warnings are errors."""

from feddd import __version__

project = "feddd"
copyright = "the feddd authors"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["results/**"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
html_theme = "furo"
html_title = f"feddd {__version__}"
