"""The flags, and the texts of --help and --mode=config: the fields of a config file with their values and comments."""

import ast
import io
import re
import shlex
import shutil
import textwrap
import tokenize
from pathlib import Path

from ml_collections import ConfigDict

from experiments.config_files import load
from experiments.errors import Mistake, meant
from experiments.training.digest import flat

ROOT = Path(__file__).parent.parent
COMMON = ROOT / "configs" / "common.py"
KINDS = {
    "text": ("run", "gpt"),
    "finetune": ("run", "finetune"),
    "language": ("run", "finetune", "gpt"),  # an objective of finetune, with the data of gpt
}  # experiment or objective -> the functions of common.py whose comments describe its config
OTHERS = ("run", "image", "folder")  # those of any other experiment

GROUPS = {  # title -> flag -> (its values, what it does)
    "the run": {
        "workdir": ("DIR", "the run's directory; without it runs/NAME-TIME"),
        "mode": ("train|eval|plan|config", "train, score a run, show the plan of the layers, or show the settings"),
        "from": ("DIR", "begin with the last state of this run"),
    },
    "a sweep: the runs that get_sweep() of the config file lists": {
        "sweep": ("", "train all runs of the sweep"),
        "sweep_index": ("I", "train only run number I of the sweep; with --mode=plan, show its plan"),
        "seeds_at_once": ("N", "train N runs of the sweep side by side, if they differ only in their seed"),
        "results": (
            "FILE",
            "append a line for every run of the sweep that finished or diverged; runs that have one are not trained",
        ),
    },
    "what is recorded": {
        "with_baseline": ("", "first train config.baseline, to compare with, in the folder baseline/ of this run"),
        "profile": ("STEPS", "trace this many steps, and show in the report where the time went"),
        "tracker": ("wandb|trackio|mlflow", "send the numbers to this service too"),
        "tag": ("NAME[,NAME]", "give the run these tags, which its report and the index of runs show"),
        "note": ("TEXT", "give the run a note, which its report and the index show too"),
    },
    "several machines": {
        "distributed": ("auto|off|HOST:PORT,N,I", "make several processes one run; off: each is a run of its own"),
    },
}
FLAGS = {name: flag for group in GROUPS.values() for name, flag in group.items()}
SETTINGS = {
    "--config=FILE[:VARIANT]": "the config file, and a variant of it, such as smoke or cifar10",
    "--config.FIELD=VALUE": "another value of a setting; a value with brackets or spaces needs quotes",
}


def text(head: str, config_file: str | None, config_files: dict[str, str], width: int = 0) -> str:
    """Return what --help prints: the usage, the flags, and the settings of a config file, or all config files.

    Args:
      head: The usage of the command.
      config_file: The config file whose settings are listed. None lists the config files.
      config_files: The first line of every config file by its name.
      width: The number of characters in a line. 0: that of the terminal.
    """
    width = max(60, width or shutil.get_terminal_size().columns)
    parts = [head.strip(), f"settings:\n{_table(SETTINGS, width)}"]
    for title, flags in GROUPS.items():
        own = {f"--{name}={values}".rstrip("="): words for name, (values, words) in flags.items()}
        parts.append(f"{title}:\n{_table(own, width)}")
    if config_file is None:
        parts.append(f"config files:\n{_table(config_files, width)}")
    else:
        parts.append(f"settings of {config_file}:\n{_table(fields(load(config_file)), width)}")
    return "\n\n".join(parts)


def _table(rows: dict[str, str], width: int, first: int = 30) -> str:
    """Return rows of a name and a text, whose lines fit into a width.

    >>> print(_table({"--sweep": "train all runs", "--tag=NAME": "give the run these tags"}, 30, 12))
      --sweep     train all runs
      --tag=NAME  give the run
                  these tags
    """
    lines = []
    for name, words in rows.items():
        if len(name) + 4 > first:
            lines.append(f"  {name}")
            name = ""
        lines += textwrap.wrap(
            words, width, initial_indent=f"  {name}".ljust(first), subsequent_indent=" " * first, break_long_words=False
        )
    return "\n".join(lines)


def listing(config: ConfigDict) -> str:
    """Return the fields of a config, a line each: as the command line writes them, and their comments."""
    return "\n".join(f"  {setting:38}  {comment}".rstrip() for setting, comment in fields(config).items())


def fields(config: ConfigDict) -> dict[str, str]:
    """Return the comments of the fields of a config, by the words that set each to its value on the command line."""
    kind = "language" if config.get("objective") == "language" else config.experiment
    known = comments(COMMON.read_text(encoding="utf-8"), KINDS.get(kind, OTHERS))
    order = list(known)
    meanings = known | arguments(config.get("model", {}).get("name", ""))
    rows = []
    for name, value in flat(config.to_dict()).items():
        group = name.partition(".")[0]
        places = [place for place, other in enumerate(order) if other == name or other.partition(".")[0] == group]
        place = order.index(name) if name in known else max(places, default=len(order)) + 0.5
        setting = f"--config.{name}={quoted(value if isinstance(value, str) else repr(value))}"
        rows.append((place, name, setting, meanings.get(name) or known.get(group, "")))
    return {setting: comment for _, _, setting, comment in sorted(rows)}


def arguments(model: str) -> dict[str, str]:
    """Return what the source of a model of nmjax says of its arguments, by dotted names. Other models have none.

    >>> arguments("vit")["model.depth"], arguments("vit")["model.size"]
    ('the number of blocks', 'one of tiny, Ti, S, B, L')
    """
    folder = ROOT / "nmjax" / "models"
    if not model.isidentifier() or not (folder / f"{model}.py").is_file():
        return {}
    found = {}
    shared, own = (ast.walk(ast.parse((folder / f"{name}.py").read_text("utf-8"))) for name in ("transformer", model))
    nodes = [node for node in shared if isinstance(node, ast.ClassDef) and node.name == "Transformer"]
    for node in [*nodes, *own]:
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "SIZES"
            and isinstance(node.value, ast.Dict)
        ):
            found["model.size"] = f"one of {', '.join(ast.literal_eval(key) for key in node.value.keys if key)}"
        if node in nodes or (isinstance(node, ast.FunctionDef) and node.name == "__init__"):  # the model's is the last
            listed = (ast.get_docstring(node) or "").partition("Args:\n")[2].partition("\n\n")[0]
            for name, words in re.findall(r"^  (\w+): (.+(?:\n    .+)*)", listed, re.MULTILINE):
                plain = " ".join(words.replace("``", "").split()).removesuffix(".")
                constant = plain.startswith(("True", "False"))
                found[f"model.{name}"] = plain if constant else plain[0].lower() + plain[1:]
    return found


def quoted(value: str) -> str:
    """Return a value as a shell takes it, in double quotes if it has single ones.

    >>> print(quoted("5%"), quoted("ste(2,4)"), quoted("soft(2,4,scale='now')"))
    5% 'ste(2,4)' "soft(2,4,scale='now')"
    """
    return f'"{value}"' if "'" in value and not set(value) & set('"$`\\!') else shlex.quote(value)


def comments(source: str, functions: tuple[str, ...]) -> dict[str, str]:
    """Return the comments of fields by dotted names, as in ``c.batch = 128  # examples in a step``.

    A field may also be a keyword of ``c.NAME = dict(...)``, on a line of its own.

    Args:
      source: The text of a Python file.
      functions: The functions whose fields count. A later one has priority.

    >>> source = "def run():\\n c.seed = 0  # of all\\n c.rate = dict(  # over time\\n  end=0,  # the last\\n )\\n"
    >>> comments(source, ("run",))
    {'seed': 'of all', 'rate': 'over time', 'rate.end': 'the last'}
    """
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    on_line = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    bodies = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    known: dict[str, str] = {}
    for assigned in (node for name in functions for node in ast.walk(bodies[name]) if isinstance(node, ast.Assign)):
        target, value = assigned.targets[0], assigned.value
        if isinstance(target, ast.Attribute):
            name = ast.unparse(target).removeprefix("c.")
            found = [(name, assigned.lineno)]
            called = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
            for keyword in value.keywords if called == "dict" else ():
                found.append((f"{name}.{keyword.arg}", keyword.value.lineno))
            known |= {each: on_line[line] for each, line in found if line in on_line}
    return known


def plain(error: str) -> str:
    """Return the error of a flag with plain words in place of Python's messages about numbers and booleans."""
    quoted = r"""('.*'|".*")"""
    error = re.sub(rf"invalid literal for int\(\) with base 10: {quoted}", r"\1 is not a whole number", error)
    error = re.sub(rf"could not convert string to float: {quoted}", r"\1 is not a number", error)
    return re.sub(rf"\('Non-boolean argument to boolean flag', {quoted}\)", r"\1 is neither true nor false", error)


def check_flags(words: list[str], config: ConfigDict) -> None:
    """Refuse a flag that does not exist, and suggest the flag or the field that may be meant."""
    takes_no_value = {"sweep", "with_baseline", "nosweep", "nowith_baseline"}
    before = ""  # the flag whose value may come next
    for word in words[1:]:
        name, equals, _ = word.lstrip("-").partition("=")
        if before or not word.startswith("-") or not name:
            before = ""
            continue
        known = name in FLAGS or name in takes_no_value or name.startswith("config.")
        if not known and name not in ("flagfile", "undefok", "helpfull", "helpshort", "helpxml"):
            raise Mistake(f"there is no flag --{name}.{_meant(name, config)}")
        before = "" if equals or name in takes_no_value else name


def _meant(name: str, config: ConfigDict) -> str:
    """Return a sentence with the field of the config or the flag that an unknown flag may mean."""
    own = name.replace("-", "_")
    if isinstance(config.get(own), ConfigDict):
        return f" Did you mean --config.{own}.FIELD? FIELD is one of {', '.join(config[own])}."
    field = next((f for f in flat(config.to_dict()) if own in (f, f.rpartition(".")[2])), None)
    if field is not None:
        return f" Did you mean --config.{field}?"
    return meant(own, ["config", *FLAGS], "--{}") or " --help lists all flags."
