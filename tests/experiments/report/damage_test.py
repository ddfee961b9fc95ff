"""Damaged runs: rows of the index, and one sentence from the report and the comparison."""

import errno
import json
import os
import random
from pathlib import Path

import pytest

from experiments.report import __main__ as command, index
from tests.experiments.report.index_test import cells, make, text

DAMAGE = {
    "cut": ('{"name": "vit", "outc', "run.json cannot be read: Unterminated string"),
    "list": ("[1]", "does not hold a JSON object"),
    "empty": ("", "run.json cannot be read: Expecting value"),
    "deep": ("[" * 100_000, "run.json cannot be read: "),
    "binary": ("\x00\ud800", "run.json cannot be read: "),
}


def test_damaged_runs_are_rows(tmp_path):
    make(tmp_path / "good")
    for name, (content, _) in DAMAGE.items():
        (make(tmp_path / name) / "run.json").write_bytes(content.encode(errors="surrogatepass"))
    for name in ("none", "begun", "folder"):
        (make(tmp_path / name) / "run.json").unlink()
    (tmp_path / "begun/metrics.jsonl").unlink()
    (tmp_path / "begun/run.lock").touch()
    (tmp_path / "folder/run.json").mkdir()
    (make(tmp_path / "half") / "config.json").write_text('{"seed"')
    rows = cells(index.render(tmp_path))
    assert len(rows) == len(DAMAGE) + 5
    for name, (_, said) in DAMAGE.items():
        assert text(rows[name]["outcome"]).startswith("damaged")
        assert said in rows[name]["outcome"].replace("&#x27;", "'")
    for name in ("none", "begun"):
        assert text(rows[name]["outcome"]) == "damaged There is no run.json."
    assert text(rows["folder"]["outcome"]).startswith("damaged run.json cannot be read: ")
    assert text(rows["half"]["outcome"]).startswith("finished config.json cannot be read: ")
    assert text(rows["good"]["outcome"]) == "finished"


ODD = [None, True, 0, -1, 1e308, 10**400, float("nan"), float("inf"), "", "x", [], [1], [1, "x"], [None, None], {}]
ODD += [{"accuracy": "x"}, {"accuracy": None, "hardened_accuracy": [1]}, {"name": {}}, {"name": 3, "dir": []}, [[[]]]]


def make_odd(folder, draw):
    """Make a run in which some fields have odd values."""
    about = ["name", "outcome", "metric", "steps", "flops", "figures", "began", "ended", "tags", "note", "parameters"]
    about += ["summary", "header", "notes", "versions", "machine", "git", "command", "unit", "comparison"]
    make(folder, outcome=draw.choice(["finished", "running"]))
    for file, fields in {"run.json": about, "config.json": ["seed", "data", "model", "sparsity", "experiment"]}.items():
        content = json.loads((folder / file).read_text())
        content |= {field: draw.choice(ODD) for field in draw.sample(fields, draw.randint(0, 2))}
        (folder / file).write_text(json.dumps(content))
    measures = {"eval": ["accuracy", "hardened_accuracy"], "train": ["loss", "per_second", "process_memory", "mfu"]}
    with (folder / "metrics.jsonl").open("a") as file:
        for kind, names in measures.items():
            odd = {name: draw.choice(ODD) for name in ("step", "seconds", *names)}
            file.write(json.dumps({"kind": kind, **odd}) + "\n")
            file.write(json.dumps({"kind": kind, **odd, "step": 70}) + "\n")
        file.write('{"kind": "eval", "st')
    return folder


@pytest.mark.parametrize("seed", range(4))
def test_no_value_of_a_field_stops_the_index(tmp_path, seed):
    draw = random.Random(seed)
    for n in range(40):
        make_odd(tmp_path / str(n), draw)
    assert len(cells(index.render(tmp_path))) == 40


def said(capsys, *args):
    """Run the command, and return its exit code and the one line that it says of a mistake; "" if there is none."""
    code, err = command.main([str(arg) for arg in args]), capsys.readouterr().err
    assert (code, err.count("\n")) in ((0, 0), (1, 1), (2, 1)), err
    return code, err.rstrip("\n")


NO_FILE = "it is not a regular file, but a folder, a named pipe or a device."
KINDS = [
    ("figures", None, "an object of numbers, but it is null."),
    ("figures", {"accuracy": "high"}, 'an object of numbers, but it is {"accuracy": "high"}.'),
    ("summary", [1], "a list of pairs, but it is [1]."),
    ("flops", [10], "a list of two numbers, but it is [10]."),
    ("steps", True, "an integer, but it is true."),
    ("outcome", 3, "a text, but it is 3."),
]
NAMED = [  # a file, its content (None: it is a folder), and what is said
    *((file, *DAMAGE[name]) for name in DAMAGE for file in ("run.json", "config.json", "text.json")),
    *((file, None, NO_FILE) for file in ("run.json", "config.json", "metrics.jsonl", "plan.html", "text.json")),
    *(("run.json", json.dumps({field: value}), f'"{field}" must be {kind}') for field, value, kind in KINDS),
]


@pytest.mark.parametrize(("file", "content", "why"), NAMED, ids=[str(n) for n in range(len(NAMED))])
def test_a_report_and_a_comparison_name_the_damaged_file(tmp_path, capsys, file, content, why):
    good, bad = make(tmp_path / "good"), make(tmp_path / "bad", "ste(2,4)")
    (bad / file).unlink(missing_ok=True)
    if content is None:
        (bad / file).mkdir()
    else:
        (bad / file).write_bytes(content.encode(errors="surrogatepass"))
    for args in ([bad], [good, bad], [tmp_path, "--baseline=x"]):
        code, line = said(capsys, *args)
        assert code == 2
        assert line.startswith(f"{bad / file} ")
        assert why.replace("run.json cannot be read: ", "") in line
    assert not [path for path in tmp_path.rglob("*.html") if path.is_file()]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("file", "content"),
    [
        (
            "text.json",
            {"prompt": "a", "samples": ["a"], "hardest": [{"loss": 1.0, "pieces": [["a", 1.0], ["b", None]]}]},
        ),
        (
            "profile/breakdown.json",
            {"seconds": 1.0, "first": 3, "steps": 2, "devices": 1, "parts": {"input": 1.0}}
            | {"slots": {"y_w": 0.5}, "layers": {"up": {"forward": 0.5}}},
        ),
    ],
)
def test_no_value_of_another_file_stops_a_report(tmp_path, capsys, seed, file, content):
    draw, folder = random.Random(seed), make(tmp_path / "a")
    (folder / "profile").mkdir()
    for field, odd in [(None, None), *((field, odd) for field in content for odd in ODD)]:
        changed = content if field is None else content | {field: odd, draw.choice(list(content)): draw.choice(ODD)}
        (folder / file).write_text(json.dumps(changed))
        code, line = said(capsys, folder)
        assert code == (2 if line else 0)
        assert line.startswith(f"{folder / file} cannot be read: ") or not line
        assert field or not line


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_no_value_of_a_field_stops_a_report_or_a_comparison(tmp_path, capsys, seed):
    """A run with odd values is shown or named. There is no traceback."""
    draw, codes = random.Random(seed), set()
    good = make(tmp_path / "good", "ste(2,4)", seed=99)
    for n in range(25):
        folder = make_odd(tmp_path / str(n), draw)
        codes |= {said(capsys, folder)[0], said(capsys, folder, good)[0]}
    assert codes == {0, 2}


def test_a_cut_line_of_a_sweeps_results_is_skipped(tmp_path, capsys):
    for name in "abc":
        make(tmp_path / name, f"{name}(2,4)")
    (tmp_path / "results.jsonl").write_text('{"run": "b"}\n[1]\n{}\n{"run": "b"}\n{"run": "a", "fo')
    assert said(capsys, tmp_path) == (0, "")
    table = (tmp_path / "compare.md").read_text()
    assert table.index("mlp=b") < table.index("mlp=a") < table.index("mlp=c")
    (tmp_path / "results.jsonl").write_bytes(b"\xff")
    assert said(capsys, tmp_path) == (0, "")


def test_a_page_that_cannot_be_written_is_a_mistake(tmp_path, capsys):
    first, second = make(tmp_path / "a"), make(tmp_path / "b", "ste(2,4)")
    file = tmp_path / "file"
    file.touch()
    for args in ([first, second], [tmp_path]):
        code, line = said(capsys, *args, f"--to={file / 'x'}")
        assert (code, line) == (2, f"{file / 'x'} cannot be written: Not a directory.")
    (first / "report.html").mkdir()
    assert said(capsys, first) == (2, f"{first / 'report.html'} cannot be written: Is a directory.")
    assert not list(tmp_path.rglob(".*"))


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 1), (errno.EDQUOT, 1), (errno.EIO, 1), (errno.EROFS, 2)])
def test_a_full_disk_is_a_failure(tmp_path, capsys, monkeypatch, number, code):
    folder = make(tmp_path / "a")

    def fail(self, data):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "write_bytes", fail)
    assert said(capsys, folder) == (code, f"{folder / 'report.html'} cannot be written: {os.strerror(number)}.")
