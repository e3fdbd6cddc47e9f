"""Builds the documentation: `sphinx-build -W -n docs build/docs`, with the group `docs`."""

import configparser
import dataclasses
import importlib
import inspect
import os
import posixpath
import re
import sys
from pathlib import Path

import mpiring

sys.path.insert(0, os.path.dirname(__file__))

import class_pages  # noqa: E402
from inventories.update import URLS  # noqa: E402

project = "mpiring"
author = "mpiring developers"
version = release = mpiring.__version__


def repository():
    """Return a link to the repository, the first URL of the package's metadata, if it has one."""
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(Path(__file__).parents[1] / "setup.cfg")
    urls = re.findall(r"https?://\S+", settings["metadata"].get("project_urls", ""))
    return f"[Repository]({urls[0]})" if urls else "[README](/project/readme.md)"


extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary",
              "sphinx.ext.intersphinx", "sphinx.ext.napoleon", "sphinx.ext.viewcode",
              "sphinx_copybutton", "sphinx_design", "sphinxcontrib.programoutput"]
html_title = f"mpiring {version}"
html_favicon = "pictures/icon.svg"
html_logo = "pictures/icon.svg"
html_theme = "pydata_sphinx_theme"
html_theme_options = {"navigation_with_keys": False, "header_links_before_dropdown": 7,
                      "logo": {"text": "mpiring", "alt_text": "mpiring"},
                      "secondary_sidebar_items": ["page-toc"], "show_toc_level": 2,
                      "pygments_light_style": "a11y-high-contrast-light",
                      "pygments_dark_style": "a11y-high-contrast-dark"}
html_sidebars = {"index": [], "install": [], "project/*": []}
html_show_sourcelink = False
html_domain_indices = False
html_static_path = ["style.css"]
html_css_files = ["style.css"]
exclude_patterns = ["styles"]
myst_heading_anchors = 4
myst_substitutions = {"version": version, "repository": repository()}
myst_enable_extensions = ["colon_fence", "substitution"]

# Docstrings are plain text, in which `x` is code; optional packages need not be installed.
default_role = "code"
autoclass_content = "both"
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_mock_imports = ["cupy"]
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autosummary_generate = False
napoleon_attr_annotations = True
toc_object_entries_show_parents = "hide"
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
viewcode_line_numbers = True

# Names of other projects' documentation, so that the site builds without a network.
intersphinx_mapping = {name: (url, f"inventories/{name}.txt") for name, url in URLS.items()}
# Other types in signatures: names that the inventories lack, and private classes, have no page.
nitpick_ignore_regex = [
    ("py:.*", r"(collections|contextlib|cupy|numpy|os|pathlib|signal|torch|typing)\..*"),
    ("py:class", r"(MPI|mpiring)\..*\.?\w+"),
]

# Public names, each with the module that documents it.
NAMES = {}
for module in ("", ".numpy", ".torch", ".optim", ".reducers", ".data", ".asynchronous",
               ".resilience", ".elastic", ".horovod.torch"):
    for name in importlib.import_module(f"mpiring{module}").__all__:
        NAMES.setdefault(name, f"mpiring{module}.{name}")
# mpiring makes their objects: nobody passes the arguments of their constructors.
MADE_BY_MPIRING = {"mpiring.Handle", "mpiring.engine.messages.Messages",
                   "mpiring.engine.persistent.Persistent", "mpiring.optim.optimizer.Optimizer"}


# Files outside docs/ that are pages of the site.
PAGES = {"README.md": "project/readme.md", "CONTRIBUTING.md": "project/contributing.md",
         "CHANGELOG.md": "project/changelog.md", "slurm/README.md": "project/slurm.md",
         "packaging/README.md": "project/packaging.md"}


def with_links_of_the_site(text, folder):
    """Return Markdown whose links start at docs/; other files of the repository are offered."""
    def link(match):
        path, anchor = posixpath.normpath(posixpath.join(folder, match[1])), match[2] or ""
        if path in PAGES:
            return f"](/{PAGES[path]}{anchor})"
        if path.startswith("docs/"):
            return f"](/{path.removeprefix('docs/')}{anchor})"
        return f"](path:/../{path})"

    return re.sub(r"\]\((?!https?:)([^)#\s]+)(#[^)\s]*)?\)", link, text)


def mend_page(app, page, source):
    """Called for a page before it is parsed."""
    source[0] = with_links_of_the_site(source[0], posixpath.dirname(f"docs/{page}"))


def mend_included(app, path, page, source):
    """Called for a file that a page includes."""
    source[0] = with_links_of_the_site(
        source[0], posixpath.normpath(posixpath.join("docs", posixpath.dirname(path.as_posix()))))


def public_name(app, env, node, contents):
    """Find `ConfigError` where `mpiring.ConfigError` is meant."""
    if node.get("reftarget") in NAMES:
        return env.get_domain("py").resolve_xref(
            env, node["refdoc"], app.builder, node["reftype"], NAMES[node["reftarget"]], node,
            contents)
    return None


def section(name):
    """Return the pattern of a section of a docstring."""
    return re.compile(rf"^{name}:\n(?:(?: .*)?\n|(?: .*)$)*", re.MULTILINE)


def with_code_blocks(app, what, name, obj, options, lines):
    """Mark programs, which are indented below the text of a docstring; put attributes last."""
    text = re.sub(r"(?m)(^\S.*\n\n)(?= {4}\S)", r"\1.. code-block:: python\n\n",
                  "\n".join(lines))
    if name in MADE_BY_MPIRING:
        text = section("Args").sub("", text)
    # Attributes become entries, as methods do.
    if attributes := section("Attributes").search(text):
        # One entry may explain several.
        entries = re.sub(r"(?m)^ {4}(\w+(?:, \w+)+)(: .*(?:\n {5,}\S.*)*)$",
                         lambda entry: "\n".join(f"    {word}{entry[2]}"
                                                 for word in entry[1].split(", ")), attributes[0])
        text = text.replace(attributes[0], "").rstrip() + "\n\n" + entries
    lines[:] = text.split("\n")


def with_short_types(app, what, name, obj, options, signature, returned):
    """Write `ndarray` for the type of an array of any shape and dtype."""
    types = app.env.current_document.autodoc_annotations.get(name, {})
    for argument, text in types.items():
        types[argument] = re.sub(r"(?<=ndarray)\[tuple\[\S*Any, \.\.\.\], \S*?\]\]", "", text)


def with_defaults(app, what, name, obj, options, signature, returned):
    """Show defaults as users write them."""
    if name == "mpiring.Config":
        # None, as declared, stands for the variable and then for these.
        given = (f"{field.name}={field.metadata['default']!r}" for field in dataclasses.fields(obj))
        return f"({', '.join(given)})", None
    if signature and name.startswith("mpiring.horovod."):
        signature = re.sub(r"ProcessSet\(.*?\)", "global_process_set", signature)
        return re.sub(r"<class '[\w.]*NoneCompressor'>", "Compression.none", signature), returned
    return None


def source_of(app, module, name):
    """Return the module that defines a public class: its `__module__` may be the public one."""
    name = name.partition(".")[0]
    item = getattr(importlib.import_module(module), name)
    for each in list(sys.modules.values()) if isinstance(item, type) else ():
        is_here = getattr(each, "__dict__", {}).get(name) is item
        if is_here and f"\nclass {name}" in inspect.getsource(each):
            return each.__name__
    return None


def setup(app):
    """Called by Sphinx."""
    app.connect("builder-inited", class_pages.write_pages)
    app.connect("source-read", class_pages.link_pages)
    app.connect("source-read", mend_page)
    app.connect("include-read", mend_included)
    app.connect("missing-reference", public_name)
    app.connect("autodoc-process-docstring", with_code_blocks, priority=400)
    app.connect("autodoc-process-signature", with_defaults)
    app.connect("viewcode-follow-imported", source_of)
    app.connect("autodoc-process-signature", with_short_types, priority=400)
