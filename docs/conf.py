"""How Sphinx builds the documentation: `make docs`."""

from __future__ import annotations

import enum
import inspect
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import smp_tf  # above TensorFlow, which autodoc imports

project = "smp_tf"
release = version = smp_tf.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"smp_tf {release}"
html_show_copyright = False
html_static_path: list[str] = []
exclude_patterns = ["pictures/README.md"]
# One back quote is code in the docstrings.
default_role = "literal"
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
# Drawings and shell sessions have no language.
highlight_language = "none"


class PublicNames(SphinxDirective):
    """Documents the public names that are defined in some modules, from their docstrings.

    Without an argument: those of all modules that no other use on the page has named, so that none can be missing.
    """

    optional_arguments = 100
    has_content = False
    named: ClassVar[set[str]] = set()

    def run(self) -> list[nodes.Node]:
        """Writes the autodoc directives and parses them."""
        modules = set(self.arguments)
        if modules:
            self.named.update(modules)
            names = [name for name in smp_tf.__all__ if module_of(name) in modules]
            if not names:
                raise self.error(f"None of the modules {sorted(modules)} defines a public name.")
        else:
            names = [name for name in smp_tf.__all__ if module_of(name) not in self.named]
        lines = [line for name in sorted(names, key=str.lower) for line in directive(name)]
        holder = nodes.container()
        holder.document = self.state.document
        self.state.nested_parse(StringList(lines, source=f"{self.get_source_info()[0]}"), self.content_offset, holder)
        return holder.children


def module_of(name: str) -> str:
    """Returns the module that defines a public name."""
    return smp_tf._WHERE[name].partition(":")[0]


def directive(name: str) -> list[str]:
    """Returns the lines of reStructuredText that document a public name."""
    value: Any = getattr(smp_tf, name)
    if isinstance(value, types.ModuleType):
        return [f".. automodule:: smp_tf.{name}", "   :members:", ""]
    if isinstance(value, enum.Enum):
        return [".. py:currentmodule:: smp_tf", "", f".. py:data:: {name}", "", f"   The group `{value}`.", ""]
    if inspect.isclass(value):
        options = ["   :members:"] + ["   :undoc-members:"] * issubclass(value, enum.Enum)
        return [f".. autoclass:: smp_tf.{name}", *options, ""]
    return [f".. autofunction:: smp_tf.{name}", ""]


def setup(app: Sphinx) -> dict[str, bool]:
    """Makes the directive known to Sphinx."""
    app.add_directive("public-names", PublicNames)
    app.connect("env-purge-doc", lambda app, env, name: PublicNames.named.clear() if name == "api" else None)
    return {"parallel_read_safe": False}
