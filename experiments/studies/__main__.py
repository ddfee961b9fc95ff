"""Studies without claims: diagnostics of training, one-shot pruning, and simple methods.

Each command runs the cases that its results do not have, and appends them.

python -m experiments.studies baselines    what simple methods reach on the same data
python -m experiments.studies descent      the actual and the predicted descent of a step
python -m experiments.studies dw           the errors of dw with pruned gradients, by the number of tokens summed
python -m experiments.studies noise        the gradients' variance and Adam's second moment
python -m experiments.studies one_shot     the perplexity of Gemma 3 270M, 2:4 in one shot
python -m experiments.studies smollm2      SmolLM2 135M pruned in one shot, and trained after it
python -m experiments.studies times        the time of a step of every config of the studies with claims
python -m experiments.studies recover      what one-shot pruning and sparse fine-tuning cost a pretrained encoder
"""

import argparse
import importlib
import math
import sys
from pathlib import Path

import jax

from experiments import collected, files
from experiments.errors import Failed, Mistake
from experiments.training import device, digest, provenance

NAMES = ("baselines", "descent", "dw", "noise", "one_shot", "recover", "smollm2", "times")
RESULTS = Path(__file__).parent.parent / "results"


def command(name: str) -> str:
    """Return the command that runs a study."""
    return f"python -m experiments.studies {name}"


def outcome(rows: dict[str, list]) -> str:
    """Return "finished", or say which measure was not finite first.

    Args:
      rows: For each measure its values, one for each look.
    """
    for name, values in rows.items():
        for number, value in enumerate(values, 1):
            if not math.isfinite(value):
                return f"diverged: the {name} is {value} at look {number}"
    return "finished"


def add(name: str, results: Path = RESULTS) -> None:
    """Run the cases of a study that its results do not have, and append each to them as it ends.

    Args:
      name: One of NAMES.
      results: The folder of the results.
    """
    study = importlib.import_module(f"experiments.studies.{name}")
    path = results / f"{name}_{'cpu' if jax.default_backend() == 'cpu' else 'gpu'}.jsonl"
    recorded = {line["run"] for line in files.lines(path) if line.get("format") == collected.FORMAT}
    for case in study.CASES:
        run = ",".join(f"{field}={value}" for field, value in case.items())
        if run in recorded:
            continue
        began = provenance.now()
        rows, notes = study.run(**case)
        line = {"format": collected.FORMAT, "run": run, "case": case, "outcome": outcome(rows), "rows": rows}
        line["config"] = digest.identity(study.config(**case)).digest
        line |= {"began": began, "ended": provenance.now(), "command": command(name)}
        line |= {"versions": provenance.versions(), "machine": provenance.machine()}
        line |= {"git": provenance.git(), "notes": notes}
        line["devices"] = device.named()
        files.append(path, lambda known, line=line: [line])
        print(f"{run}: {', '.join(f'{name} {values[-1]:.4g}' for name, values in rows.items())}", flush=True)


def main(args: list[str] | None = None) -> int:
    """Run the study that a command names, and return the exit code."""
    parser = argparse.ArgumentParser(
        "python -m experiments.studies",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("study", choices=NAMES, help="the study to run")
    options = parser.parse_args(args)
    device.keep_memory()
    try:
        add(options.study)
    except (Mistake, Failed) as error:
        print(error, file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
