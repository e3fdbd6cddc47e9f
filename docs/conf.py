"""Builds the documentation: `sphinx-build -W -n docs build/docs`, with the group `docs`."""

import os
import re

import mpiring

project = "mpiring"
author = "mpiring developers"
version = release = mpiring.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton",
              "sphinxcontrib.programoutput"]
html_title = "mpiring"
html_theme = "pydata_sphinx_theme"
html_theme_options = {"show_prev_next": False, "navigation_with_keys": False,
                      "secondary_sidebar_items": ["page-toc"],
                      # In these, lines of a diff that come and go differ in colour.
                      "pygments_light_style": "tango", "pygments_dark_style": "monokai"}
html_show_sourcelink = False
html_domain_indices = False
html_static_path = ["style.css"]
html_css_files = ["style.css"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

# Docstrings are plain text, in which `x` is code; what is optional need not be installed.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_mock_imports = ["cupy"]
toc_object_entries_show_parents = "hide"
python_maximum_signature_line_length = 88
# Types in signatures: other projects' have their inventories elsewhere, and what is ours but not
# public has no page.
nitpick_ignore_regex = [
    ("py:.*", r"(collections|contextlib|cupy|numpy|os|pathlib|signal|torch|typing)\..*"),
    ("py:class", r"(MPI|mpiring)\..*\.?\w+"),
    # Of mpiring.horovod, with the interface that it follows.
    ("py:exc", "HorovodInternalError"),
]


def files_of_the_repository(app, page, source):
    """Offer what a page links outside docs/, such as an example, as a file."""
    def link(match):
        path = os.path.normpath(os.path.join(os.path.dirname(page), match[1]))
        return f"](path:{match[1]})" if path.startswith("..") else match[0]

    source[0] = re.sub(r"\]\((\.\./[^)#\s]*)(?:#[^)\s]*)?\)", link, source[0])


def public_name(app, env, node, contents):
    """Find `ConfigError` where `mpiring.ConfigError` is meant."""
    if node.get("reftarget") in mpiring.__all__:
        return env.get_domain("py").resolve_xref(
            env, node["refdoc"], app.builder, node["reftype"], f"mpiring.{node['reftarget']}",
            node, contents)
    return None


def with_code_blocks(app, what, name, obj, options, lines):
    """Mark the programs in a docstring, which stand indented below its text."""
    text = re.sub(r"(?m)(^\S.*\n\n)(?= {4}\S)", r"\1.. code-block:: python\n\n",
                  "\n".join(lines))
    lines[:] = text.split("\n")


def setup(app):
    """Called by Sphinx."""
    app.connect("source-read", files_of_the_repository)
    app.connect("missing-reference", public_name)
    app.connect("autodoc-process-docstring", with_code_blocks, priority=400)
