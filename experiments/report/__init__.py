"""The report of a run: one page, report.html, made from the run's files. It fetches nothing.

    python -m experiments.report RUN            report.html of a run
    python -m experiments.report RUN RUN ...    compare.html and compare.md of several runs, or of all runs of a sweep
    python -m experiments.report DIR            index.html of all runs in any other folder

RUN is the folder of a run. A page can be made at any time, also while the run continues or after it failed.
docs/reference/run_directory.md has the files that it is made from, and their limits.
"""

from pathlib import Path
from typing import Any

from experiments.files import replace
from experiments.report.page import plan_page, render
from experiments.report.runs import Run, read

__all__ = ["Run", "plan_page", "read", "render", "write"]


def write(run_dir: Path, about: dict[str, Any] | None = None) -> Path:
    """Write report.html into a run's folder, whole or not at all, and return its path.

    Args:
      run_dir: The run's folder.
      about: What run.json is about to say. Without it, the report is of what run.json says.
    """
    page, run = Path(run_dir) / "report.html", read(Path(run_dir))
    replace(page, render(run if about is None else run._replace(about=about)))
    return page
