"""The report of the benchmark of kernels, written after every row."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from experiments.bench.measure import in_short, machine, markdown
from nmjax.kernels.targets import Target


class Setting(NamedTuple):
    """The arguments that every stage of the benchmark gets."""

    target: Target
    sizes: tuple[int, ...]
    rounds: int
    quick: bool  # fewer and smaller cases


class Report:
    """The results so far. They are written after every row.

    Args:
      path: The path without an ending; None to write no file.
      command: The command that runs.
      device: The device's kind.
      about: A sentence about the whole report.
    """

    def __init__(self, path: Path | None, command: str, device: str, about: str) -> None:
        self.path = path
        self.results = {"command": command, "machine": machine(), "device": device, "about": about, "stages": {}}

    def stage(self, name: str, state: str) -> None:
        """Begin a stage."""
        self.current = self.results["stages"][name] = {"state": state, "seconds": None, "error": None, "tables": []}
        print(f"\n{name}: {state}", flush=True)
        self.save()

    def ended(self, seconds: float, error: Exception | None) -> None:
        """End the stage after so many seconds, with the error that it raised."""
        reason = error and in_short(error)
        self.current |= {"state": "failed" if error else "done", "seconds": round(seconds, 1), "error": reason}
        print(f"{self.current['state']} in {seconds:.1f} s" + (f": {reason}" if error else ""), flush=True)
        self.save()

    def table(self, title: str, note: str, head: list[str]) -> None:
        """Begin a table of the stage."""
        self.current["tables"].append({"title": title, "note": note, "head": head, "rows": []})
        print(f"  {title}. {note}\n    {' | '.join(head)}", flush=True)

    def row(self, *values: Any) -> None:
        """Add a row to the table."""
        self.current["tables"][-1]["rows"].append([v.item() if hasattr(v, "item") else v for v in values])
        print(f"    {' | '.join(map(shown, values))}", flush=True)
        self.save()

    def save(self) -> None:
        """Write the files, each whole or not at all."""
        if self.path:
            self.path.parent.mkdir(exist_ok=True)
            for ending, text in ((".json", json.dumps(self.results, indent=1)), (".md", self.text())):
                draft = self.path.with_name(f"{self.path.name}{ending}.part")
                draft.write_text(text)
                draft.replace(self.path.with_name(self.path.name + ending))

    def text(self) -> str:
        """Return the report in Markdown."""
        lines = [f"# kernels\n\n{self.results['machine']}  \n`{self.results['command']}`\n\n{self.results['about']}\n"]
        for name, stage in self.results["stages"].items():
            took = f", {stage['seconds']} s" if stage["seconds"] is not None else ""
            lines.append(f"# {name}: {stage['state']}{took}\n")
            if stage["error"]:
                lines.append(f"`{stage['error']}`\n")
            for table in stage["tables"]:
                rows = {row[0]: [shown(v) for v in row[1:]] for row in table["rows"]}
                lines.append(markdown(table["title"], table["note"], rows, table["head"]))
        return "\n".join(lines)


def shown(value: str | float | None) -> str:
    """Return a cell as text."""
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.3g}"
