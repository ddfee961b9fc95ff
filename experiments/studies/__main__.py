"""What is looked at while a network trains, not at its end: each of CASES that is not in the results is run, and appended.

python -m experiments.studies descent      how far a step descends, and how far it should
python -m experiments.studies dw           what pruned gradients make of dw, by how much is summed
python -m experiments.studies noise        gradients' variance and Adam's second moment
"""

import importlib
import math
import sys
from pathlib import Path

import jax

from experiments import files, sweep
from experiments.errors import Mistake
from experiments.training import digest, provenance

NAMES = ("descent", "dw", "noise")
RESULTS = Path(__file__).parent.parent / "results"


def command(name: str) -> str:
    return f"python -m experiments.studies {name}"


def outcome(rows: dict[str, list]) -> str:
    for name, values in rows.items():
        if bad := [n for n, value in enumerate(values) if not math.isfinite(value)]:
            return f"diverged: the {name} is {values[bad[0]]} at look {bad[0] + 1}"
    return "finished"


def add(name: str, results: Path = RESULTS) -> None:
    """Run the cases of a study that its file of results has not, and append each as it ends."""
    study = importlib.import_module(f"experiments.studies.{name}")
    path = results / f"{name}_{'cpu' if jax.default_backend() == 'cpu' else 'gpu'}.jsonl"
    held = {line["run"] for line in files.lines(path) if line.get("format") == sweep.FORMAT}
    for case in study.CASES:
        if (run := ",".join(f"{field}={value}" for field, value in case.items())) not in held:
            began = provenance.now()
            rows, notes = study.run(**case)
            line = {"format": sweep.FORMAT, "run": run, "case": case, "outcome": outcome(rows), "rows": rows}
            line["config"] = digest.identity(study.config(**case)).digest
            line |= {"began": began, "ended": provenance.now()}
            line |= {"command": command(name), "versions": provenance.versions(), "git": provenance.git(), "notes": notes}
            line["devices"] = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
            files.append(path, lambda there, line=line: [line])
            print(f"{run}: {study.told(line)}", flush=True)


def main(words: list[str]) -> int:
    try:
        if len(words) != 1 or words[0] not in NAMES:
            raise Mistake(f"python -m experiments.studies takes one of {', '.join(NAMES)}.")
        add(words[0])
    except Mistake as mistake:
        print(mistake, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
