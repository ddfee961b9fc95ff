"""The table of a comparison, as text."""

from experiments.report.compare import Comparison, Row
from experiments.report.words import PLUS_MINUS, duration, large, markdown_table, plus_minus, score, visible

BASELINE = "The baseline is"
TEST = "Scores are from the test split"
VALIDATION = ". Columns named validation are from the validation split. Use those to choose a config"
RELATIVE = {  # fields of rows that are shares of the baseline's: the titles of their columns
    "cost": "effective FLOPs",
    "steps_time": "time of all steps",
    "temporary": "temporary memory",
}
SHARES = (
    "Effective FLOPs, the time of all steps and the temporary memory of a step are shares of the baseline's. The time "
    "is without compilation and evaluations."
)
DIFFERENCES = (
    "A difference is the mean over the seeds that both configs have. If they share no seed, it is the difference of "
    "the means, marked unpaired. 'May be chance' means that the 95 % interval of the difference, by Student's t, "
    "contains 0. A difference without ± is of too few seeds to tell."
)
MEMORY = {
    "device_memory": "Device memory is the most that was in use on a device at one time.",
    "process_memory": "Process memory is the most that was in use by the process of the run at one time.",
}
SO_FAR = "If a process trains runs one after another, a later one shows at least the memory of those before it."


def legend(comparison: Comparison) -> str:
    """Return an explanation of the numbers in the table."""
    base = f"{BASELINE} {comparison.names[comparison.base]}: {comparison.why}."
    validated = any(name.startswith("validation_") for name in comparison.others)
    splits = f"{TEST}{VALIDATION if validated else ''}."
    memory = [f"{MEMORY[comparison.memory]} {SO_FAR}"] if comparison.memory else []
    return " ".join([splits, base, PLUS_MINUS, DIFFERENCES, SHARES, *memory])


def head(comparison: Comparison) -> list[str]:
    """Return the titles of the columns."""
    scores = [metric.replace("_", " ") for metric in (comparison.metric, *comparison.others)]
    memory = [comparison.memory.replace("_", " ")] if comparison.memory else []
    costs = [*_relative(comparison).values(), "time of a run", *memory]
    return ["config", scores[0], "seeds", "difference to the baseline", *costs, *scores[1:], ""]


def _relative(comparison: Comparison) -> dict[str, str]:
    """Return the entries of `RELATIVE` that are shown: the cost, and others if a row has them."""
    known = lambda name: name == "cost" or any(getattr(row, name) is not None for row in comparison.rows)
    return {name: title for name, title in RELATIVE.items() if known(name)}


def cells(comparison: Comparison) -> list[list[str]]:
    """Return the cells of all rows."""
    return [_cells(comparison, row, number) for number, row in enumerate(comparison.rows)]


def _cells(comparison: Comparison, row: Row, number: int) -> list[str]:
    mean = comparison.say(row.mean) + comparison.plus_minus(row.mean_error)
    difference = "the baseline"
    if number != comparison.base:
        difference = comparison.say(row.difference, signed=True) + comparison.plus_minus(row.error)
        if row.difference is not None and not row.paired:
            difference += ", unpaired"
        if row.apart is False:
            difference += ", may be chance"
    others = [score(name, value) + plus_minus(name, error) for name, (value, error) in row.others.items()]
    shares = [getattr(row, name) for name in _relative(comparison)]
    costs = ["" if share is None else f"{share:.3f}" for share in shares]
    time = "" if row.time is None else duration(row.time)
    memory = []
    if comparison.memory:
        memory = ["" if row.memory is None else f"{large(row.memory)}B"]
    return [row.name, mean, row.seeds, difference, *costs, time, *memory, *others, row.marks]


def markdown(comparison: Comparison) -> str:
    """Return the table as Markdown."""
    parts = [markdown_table([head(comparison), *cells(comparison)]), legend(comparison), *comparison.notes]
    return visible("\n\n".join(parts) + "\n")
