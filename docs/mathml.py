"""A Sphinx extension that writes formulas as MathML, which browsers render without a script or a download."""

from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx.application import Sphinx


def inline(self: Any, node: nodes.math) -> None:
    """Write a formula inside a line."""
    self.body.append(latex2mathml.tex2mathml(node.astext()))
    raise nodes.SkipNode


def block(self: Any, node: nodes.math_block) -> None:
    """Write a formula as a paragraph of its own."""
    self.body.append(f'<div class="math">{latex2mathml.tex2mathml(node.astext().strip(), as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
