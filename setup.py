"""Build the package. pyproject.toml has its settings; this file makes the README's links absolute.

A package index shows the README without the repository, so relative links and pictures lead nowhere there. GitHub's
workflows say which repository and tag they build, and links get its address. Elsewhere the README stays as it is.
"""

import os
import re
from pathlib import Path

from setuptools import setup

RELATIVE = r"(?!https?://|#)([^)\"'\s]+)"


def absolute(text: str, repository: str, tag: str) -> str:
    """Return a page whose relative links and pictures lead to a tag of a repository on the web."""
    page, picture = rf"\1{repository}/blob/{tag}/\2", rf"\1{repository}/raw/{tag}/\2"
    text = re.sub(rf"(!\[[^\]]*\]\(){RELATIVE}", picture, text)
    text = re.sub(rf"(\b(?:src|srcset)=[\"']){RELATIVE}", picture, text)
    return re.sub(rf"(\]\(|\bhref=[\"']){RELATIVE}", page, text)


if __name__ == "__main__":
    page, urls = Path("README.md").read_text(encoding="utf-8"), {}
    if name := os.environ.get("GITHUB_REPOSITORY"):
        home = f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{name}"
        page = absolute(page, home, os.environ.get("GITHUB_REF_NAME", "main"))
        urls = {"Source": home, "Changelog": f"{home}/blob/main/CHANGELOG.md"}
    setup(long_description=page, long_description_content_type="text/markdown", project_urls=urls)
