"""What is asked for and what was found so far, written after every row."""

import json
from pathlib import Path
from typing import NamedTuple

from experiments.bench.measure import in_short, machine, markdown
from nmjax.kernels.targets import Target


class Setting(NamedTuple):
    """What is asked for."""

    here: Target
    sizes: tuple[int, ...]
    rounds: int
    quick: bool


class Report:
    """What was found so far, written after every row."""

    def __init__(self, path: Path | None, command: str, device: str, about: str):
        self.path = path
        self.found = {"command": command, "machine": machine(), "device": device, "about": about, "stages": {}}

    def stage(self, name: str, state: str) -> None:
        self.here = self.found["stages"][name] = {"state": state, "seconds": None, "error": None, "tables": []}
        print(f"\n{name}: {state}", flush=True)
        self.save()

    def ended(self, seconds: float, error: Exception | None) -> None:
        told = error and in_short(error)
        self.here |= {"state": "failed" if error else "done", "seconds": round(seconds, 1), "error": told}
        print(f"{self.here['state']} in {seconds:.1f} s" + (f": {told}" if error else ""), flush=True)
        self.save()

    def table(self, title: str, note: str, head: list[str]) -> None:
        self.here["tables"].append({"title": title, "note": note, "head": head, "rows": []})
        print(f"  {title}. {note}\n    {' | '.join(head)}", flush=True)

    def row(self, *values) -> None:
        self.here["tables"][-1]["rows"].append([v.item() if hasattr(v, "item") else v for v in values])
        print(f"    {' | '.join(map(shown, values))}", flush=True)
        self.save()

    def save(self) -> None:
        if self.path:
            self.path.parent.mkdir(exist_ok=True)
            for ending, text in ((".json", json.dumps(self.found, indent=1)), (".md", self.text())):
                made = self.path.with_name(f"{self.path.name}{ending}.part")
                made.write_text(text)
                made.replace(self.path.with_name(self.path.name + ending))

    def text(self) -> str:
        lines = [f"# kernels\n\n{self.found['machine']}  \n`{self.found['command']}`\n\n{self.found['about']}\n"]
        for name, stage in self.found["stages"].items():
            took = f", {stage['seconds']} s" if stage["seconds"] is not None else ""
            lines.append(f"# {name}: {stage['state']}{took}\n")
            lines += [f"`{stage['error']}`\n"] if stage["error"] else []
            for table in stage["tables"]:
                rows = {row[0]: [shown(v) for v in row[1:]] for row in table["rows"]}
                lines.append(markdown(table["title"], table["note"], rows, table["head"]))
        return "\n".join(lines)


def shown(value) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:.3g}"
