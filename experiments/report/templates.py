"""Pages in HTML: templates that escape every value."""

import base64
import hashlib
import html
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from experiments.report.words import TERMS, milliseconds_of, number, percent, visible

FOLDER = Path(__file__).parent / "templates"


class _Page:
    """What a page has so far: the links to its sections, and the terms that none of its parts has explained."""

    def __init__(self, terms: dict[str, str]):
        self.links: list[tuple[str, str]] = []
        self._left = dict(terms)

    def link(self, key: str, title: str) -> str:
        """Keep a link to a section, and return an empty text."""
        self.links.append((key, title))
        return ""

    def terms(self, body: str) -> list[tuple[str, str]]:
        """Return the terms that a part of the page is the first to use, with their meanings."""
        labels = " ".join(re.findall(r'aria-label="([^"]*)"', body))
        text = html.unescape(re.sub(r"<(style|details)\b.*?</\1>|<[^>]*>", " ", body, flags=re.DOTALL) + labels).lower()
        used = [term for term in self._left if re.search(rf"(?<!\w){re.escape(term.lower())}(?!\w)", text)]
        return [(term, self._left.pop(term)) for term in used]


def _finalized(value: Any) -> Any:
    return value if isinstance(value, Markup) else visible(value)


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(FOLDER), autoescape=True, finalize=_finalized, undefined=StrictUndefined, trim_blocks=True,
    lstrip_blocks=True,
)  # fmt: skip
_ENVIRONMENT.filters |= {"number": number, "percent": percent, "ms": milliseconds_of, "sha256": _sha256}
_ENVIRONMENT.filters["share"] = lambda x: f"{max(0.0, min(1.0, x)) if x == x else 0:.3f}"
_MACROS = _ENVIRONMENT.get_template("macros.html.j2").module
_ENVIRONMENT.globals |= {name: macro for name, macro in vars(_MACROS).items() if not name.startswith("_")}


def fill(template: str, /, *, explain: bool = True, **values: Any) -> str:
    """Return the page that a template makes of values.

    Args:
      template: The name of the template.
      explain: Whether the page explains the terms that its header and its sections use.
      values: What the template shows. Texts are escaped, and `markupsafe.Markup` is not.
    """
    style = Markup((FOLDER / "page.css").read_text(encoding="utf-8"))
    defaults = {"page": _Page(TERMS if explain else {}), "style": style, "script": "", "reload": 0}
    return _ENVIRONMENT.get_template(f"{template}.html.j2").render(defaults | values)
