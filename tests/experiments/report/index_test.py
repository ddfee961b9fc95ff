"""The index of many runs: its rows, its frontier, damaged runs, and how much is read and drawn."""

import base64
import hashlib
import itertools
import json
import os
import random
import re
import subprocess
import urllib.parse

import pytest

from experiments import files
from experiments.report import __main__ as command, curves as cv, index, runs
from experiments.report.page import render
from experiments.report.runs import glance, last_line, read
from tests.experiments.report.report_test import CHROMIUM, HOSTILE, Tags, lines, write_run


def make(folder, method="dense", score=0.9, *, seed=0, data="digits", metric="accuracy", flops=(10, 8), **about):
    """Make a finished run of 100 steps."""
    folder.mkdir(parents=True)
    about = {"name": folder.name, "outcome": "finished", "metric": metric, "steps": 100, "flops": flops} | about
    if about["outcome"] == "finished":
        about = {"figures": {metric: score - 0.3, f"hardened_{metric}": score}} | about
    (folder / "run.json").write_text(json.dumps(about))
    config = {"seed": seed, "data": {"name": data}, "model": {"name": "vit", "size": "S"}, "sparsity": {"mlp": method}}
    (folder / "config.json").write_text(json.dumps(config))
    evals = [{"step": s, "seconds": s, "kind": "eval", f"hardened_{metric}": score * s / 100} for s in (25, 50)]
    train = [{"step": s, "seconds": s, "kind": "train", "loss": 1.0} for s in range(1, 61)]
    text = "".join(json.dumps(line) + "\n" for line in sorted(evals + train, key=lambda line: line["step"]))
    (folder / "metrics.jsonl").write_text(text)
    return folder


def cells(page):
    """Return for each run of a page its cells by the heads of the columns."""
    table = page[page.index('<table class="values index">') : page.index("</table>")]
    heads = re.findall(r"<th [^>]*>([^<]*)</th>", table[: table.index("<tbody>")])
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in table.split("<tr>")[2:]]
    return {re.sub("<[^>]*>", "", row[0]): dict(zip(heads, row, strict=True)) for row in rows}


def text(cell):
    return re.sub(" +", " ", re.sub("<[^>]*>", " ", cell)).strip()


def test_every_run_below_the_folder_is_a_row(tmp_path):
    make(tmp_path / "a").joinpath("report.html").write_text("a report")
    make(
        tmp_path / "sweep/mlp=ste-seed=1", "ste(2,4)", 0.95, seed=1, began="2026-01-31T12:00:00+00:00", note="a <note>"
    )
    make(tmp_path / "sweep/deep/c", "ste(2,4)", outcome="diverged: the loss is nan", tags=["paper", "odd"])
    make(tmp_path / ".hidden/d")
    make(tmp_path / "a/checkpoints/e")  # not searched: it is inside a run
    make(tmp_path / "a/baseline")
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "again").symlink_to(tmp_path / "sweep")
    rows = cells(index.render(tmp_path))
    assert len(rows) == 4  # links are not followed
    assert not [name for name in rows if name.startswith(("again", "loop"))]
    (name,) = (name for name in rows if name.endswith("mlp=ste-seed=1"))
    assert list(rows)[0] == name  # the only one that says when it began
    row = rows[name]
    assert [
        text(row[head]) for head in ("score", "seed", "what differs", "began", "tags and note", "share of dense")
    ] == [*("◆ 95.00 %", "1", "mlp=ste(2,4)", "31 Jan 2026, 12:00 UTC", "a &lt;note&gt;", "0.800")]
    assert text(row["data and metric"]) == "digits, hardened accuracy"
    assert text(row["model"]) == "vit S"
    assert "a/baseline" in rows
    assert rows["a"]["run"] == '<a href="a/report.html">a</a>'
    (odd,) = (row for name, row in rows.items() if name.endswith("c"))
    assert text(odd["outcome"]) == "diverged the loss is nan"
    assert text(odd["score"]) == "45.00 % so far"  # of the last evaluation
    assert text(odd["steps"]) == "50 of 100"
    assert text(odd["time"]) == "50 s"
    assert text(odd["tags and note"]) == "paper odd"
    assert "parameters" not in odd  # no run has recorded any


def beats(one, other, up):
    """Return whether a run is at least as good as another one in both figures, and better in one."""
    no_worse = one.score >= other.score if up else one.score <= other.score
    return (
        one.effective <= other.effective and no_worse and (one.effective, one.score) != (other.effective, other.score)
    )


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_the_frontier_by_enumeration(metric):
    draw = random.Random(0)
    for size in itertools.chain(range(1, 8), [60] * 20):
        found = [
            index.Entry(str(n), None, "digits", metric, draw.randint(1, 9) / 10, draw.randint(1, 9))
            for n in range(size)
        ]
        edge = index.frontier(found)
        expected = {e.place for e in found if not any(beats(other, e, metric == "accuracy") for other in found)}
        assert {e.place for e in edge} == expected
        assert [e.effective for e in edge] == sorted(e.effective for e in edge)


def test_only_what_is_comparable_shares_a_picture(tmp_path):
    for n, (data, metric) in enumerate([("digits", "accuracy"), ("cifar10", "accuracy"), ("pydoc", "loss")]):
        make(tmp_path / f"{n}good", score=0.5, data=data, metric=metric, flops=(10, 4))
        make(tmp_path / f"{n}bad", score=0.4 if metric == "accuracy" else 0.6, data=data, metric=metric, flops=(10, 5))
        make(tmp_path / f"{n}odd", data=data, metric=metric, outcome="failed: a disk", flops=(10, 1))
    page = index.render(tmp_path)
    titles = re.findall("<h3>([^<]*)</h3>", page)
    assert sorted(titles) == [f"hardened {x}" for x in ("accuracy on cifar10", "accuracy on digits", "loss on pydoc")]
    rows = cells(page)
    assert {name for name, row in rows.items() if "◆" in row["score"]} == {"0good", "1good", "2good"}
    assert page.count("<use ") == 6  # a failed run is no point


def test_hardened_scores_count_where_all_finished_runs_have_them(tmp_path):
    make(tmp_path / "a", score=0.9)
    make(tmp_path / "b", score=0.8, outcome="running")
    assert text(cells(index.render(tmp_path))["a"]["score"]) == "◆ 90.00 %"
    make(tmp_path / "c", figures={"accuracy": 0.7})
    rows = cells(index.render(tmp_path))
    assert text(rows["a"]["score"]) == "60.00 %"  # of the weights in training form
    assert text(rows["c"]["score"]) == "◆ 70.00 %"
    assert text(rows["b"]["score"]) == ""


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_scores_of_the_two_splits_have_a_column_each(tmp_path, metric):
    """The numbers of a running run are of the split on which it is evaluated, as its config says."""
    hardened = f"hardened_{metric}"
    say = lambda x: f"{100 * x:.2f} %" if metric == "accuracy" else f"{x:.4f}"
    make(tmp_path / "done", metric=metric, figures={hardened: 0.9, f"validation_{hardened}": 0.8})
    make(tmp_path / "old", metric=metric, figures={hardened: 0.7})
    for name, share in {"on": 0.1, "off": 0, "unsaid": None, "odd": "x"}.items():
        folder = make(tmp_path / name, score=0.6, metric=metric, outcome="running")
        config = json.loads((folder / "config.json").read_text())
        config["data"] |= {} if share is None else {"validation": share}
        (folder / "config.json").write_text(json.dumps(config))
    page = index.render(tmp_path)
    found = {name: (text(row["score"]), text(row["validation"])) for name, row in cells(page).items()}
    assert found["done"] == (f"◆ {say(0.9)}" if metric == "accuracy" else say(0.9), say(0.8))
    assert found["old"] == (say(0.7) if metric == "accuracy" else f"◆ {say(0.7)}", "")
    assert found["on"] == ("", f"{say(0.3)} so far")
    assert found["off"] == found["unsaid"] == found["odd"] == (f"{say(0.3)} so far", "")
    assert page.count(f'<td data-v="0.8">{say(0.8)}') == 1  # the column can be sorted


def test_words_are_explained_and_one_chooses_by_validation(tmp_path):
    make(tmp_path / "a", figures={"hardened_accuracy": 0.9, "validation_hardened_accuracy": 0.8})
    page = index.render(tmp_path)
    assert "To choose a run, compare the scores in the column validation of the table." in page
    words = re.findall("<dt>(.*?)</dt>", page)
    assert {"hardened", "effective", "share of dense", "frontier", "validation"} <= set(words)
    assert len(words) == len(set(words))
    assert "best" not in words  # its meaning is the best evaluation of one run
    assert page.index("<dt>hardened</dt>") < page.index('<section id="frontier">')  # under the table that has the word


MANY = {f"field{i}": 1 for i in range(10)} | {"sparsity": {"mlp": "ste(2,4)"}}


@pytest.mark.parametrize(
    ("configs", "differs"),
    [
        (  # methods come first, and rules last
            [{"alpha": 1, "rules": [1], "sparsity": {}}, {"alpha": 2, "rules": [2], "sparsity": {"mlp": "x"}}],
            ["sparsity={}, alpha=1, rules=[1]", "mlp=x, alpha=2, rules=[2]"],
        ),
        (  # a dense run is said to be
            [{"alpha": 1, "sparsity": {"mlp": "x"}}, {"alpha": 1, "sparsity": {}, "dense": True}],
            ["mlp=x", "dense, dense=True"],
        ),
        (  # many fields are counted
            [MANY, dict.fromkeys(MANY, 0) | {"sparsity": {"mlp": "ste(1,4)"}}],
            ["mlp=ste(2,4), " + ", ".join(f"field{i}=1" for i in range(5)) + ", and 5 more"]
            + ["mlp=ste(1,4), " + ", ".join(f"field{i}=0" for i in range(5)) + ", and 5 more"],
        ),
    ],
)
def test_what_differs(tmp_path, configs, differs):
    for name, config in zip("ab", configs, strict=True):
        folder = make(tmp_path / name, flops=(10, 10 if config.get("dense") else 8))
        (folder / "config.json").write_text(json.dumps(config))
    rows = cells(index.render(tmp_path))
    assert [text(rows[name]["what differs"]) for name in "ab"] == differs


def test_a_name_that_the_folder_does_not_have_is_shown(tmp_path):
    make(tmp_path / "first", name="vit_24")
    make(tmp_path / "vit_24-20260131-120000", name="vit_24")
    make(tmp_path / "sweep/mlp=ste-2-4", name="mlp=ste(2,4)")  # stands in "what differs"
    names = {"first vit_24", "vit_24-20260131-120000", "sweep/mlp=ste-2-4"}
    assert set(cells(index.render(tmp_path))) == names


def test_nothing_of_a_run_is_markup(tmp_path):
    hostile = dict.fromkeys(("name", "metric", "began", "note"), HOSTILE)
    folder = make(tmp_path / "a<i>&'\"b", HOSTILE, 0.5, data=HOSTILE, tags=[HOSTILE], **hostile)
    make(tmp_path / "b", outcome=f"failed: {HOSTILE}", figures={HOSTILE: 1})
    (folder / "report.html").touch()
    page = index.render(tmp_path)
    tags = Tags(page)
    assert not {"i", "iframe", "object"} & set(tags.tags)
    assert tags.tags.count("script") == 1
    assert page.count("alert(1)") == page.count("&lt;script&gt;alert(1)&lt;/script&gt;")
    assert not re.search("[\x00-\x08\x0e-\x1f]", page)


def test_an_address_leads_to_its_report(tmp_path):
    names = ["a b", "50%", "what?", "#1", "data:x", "blocks=ste(2,4),seed=0", "ü", "&amp;", os.fsdecode(b"\xff")]
    for name in names:
        (make(tmp_path / "runs" / name) / "report.html").touch()
    for to in (tmp_path / "runs", tmp_path / "else/where"):
        references = Tags(index.render(tmp_path / "runs", to)).links
        paths = {os.path.normpath(to / os.fsdecode(urllib.parse.unquote_to_bytes(r))) for r in references}
        assert paths == {str(tmp_path / "runs" / name / "report.html") for name in names}


def test_the_page_fetches_nothing_and_runs_its_own_script_alone(tmp_path):
    make(tmp_path / "a")
    page = index.render(tmp_path)
    script = page[page.index("<script>") + 8 : page.index("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = re.search('Content-Security-Policy" content="([^"]*)"', page)[1]
    assert policy == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert "script-src" not in render(read(tmp_path / "a"))
    assert not Tags(page).links
    assert (
        '<div class="controls" hidden>' in page
    )  # shown by the script: without it nothing is there that does not work


# ---- the command ----


def test_the_page_that_a_folder_gets(tmp_path, capsys):
    first, second = make(tmp_path / "sweep/a"), make(tmp_path / "sweep/b", "ste(2,4)")
    made = lambda: {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.html")}
    assert command.main([str(first)]) == 0
    assert made() == {"sweep/a/report.html"}
    assert command.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith(f"{tmp_path / 'index.html'}\n")
    assert made() == {"sweep/a/report.html", "index.html"}
    (tmp_path / "sweep/results.jsonl").touch()  # now it is a sweep
    assert command.main([str(tmp_path / "sweep")]) == 0
    assert made() == {"sweep/a/report.html", "index.html", "sweep/compare.html"}
    assert command.main([str(first), str(second), "--to", str(tmp_path / "two")]) == 0
    assert "two/compare.html" in made()
    assert command.main([str(tmp_path), "--to", str(tmp_path / "three")]) == 0
    assert '<a href="../sweep/a/report.html">' in (tmp_path / "three/index.html").read_text()
    assert command.main([str(tmp_path)]) == 0  # an index is written anew
    capsys.readouterr()
    page = tmp_path / "index.html"
    page.write_text("<h1>My page</h1>")
    assert command.main([str(tmp_path)]) == 2
    expected = f"{page} is another page, not an index of runs. Name another folder for the index: --to=DIR.\n"
    assert capsys.readouterr().err == expected
    assert page.read_text() == "<h1>My page</h1>"


# ---- how much is read and drawn ----


def test_of_a_finished_run_two_files_are_read(tmp_path, monkeypatch):
    """And of metrics.jsonl only the end."""
    for n in range(20):
        make(tmp_path / f"run{n}", outcome="running" if n == 7 else "finished")
    long = tmp_path / "run7" / "metrics.jsonl"
    long.write_text('{"kind": "eval", "step": 1}\n' * 100_000 + '{"kind": "eval", "step": 2}\n')
    opened, parsed = [], []
    real, parse = files.opened, runs.parse_metrics
    monkeypatch.setattr(files, "opened", lambda path, links=True: (opened.append(path), real(path, links))[1])
    monkeypatch.setattr(runs, "parse_metrics", lambda line: (parsed.append(line), parse(line))[1])
    index.entries(tmp_path)
    names = [path.name for path in opened]
    assert sorted(names) == ["config.json"] * 20 + ["metrics.jsonl"] + ["run.json"] * 20
    assert len(parsed) == 1


@pytest.mark.parametrize("block", [1, 7, 64, 2**16])
def test_the_last_evaluation_is_found_from_the_end(tmp_path, block, monkeypatch):
    monkeypatch.setattr(runs, "BLOCK", block)
    folder = make(tmp_path / "a", outcome="running")
    assert last_line(folder / "metrics.jsonl", "eval")["step"] == 50
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "eval", "step": 60, "hardened_accur')  # cut off
    assert last_line(folder / "metrics.jsonl", "eval")["step"] == 50
    assert glance(folder).metrics["eval"][0]["step"] == 50
    (folder / "metrics.jsonl").write_text('{"kind": "eval", "step": 5}')
    assert last_line(folder / "metrics.jsonl", "eval")["step"] == 5
    for content in ("", "\n", '{"kind": "train", "step": 5}\n'):
        (folder / "metrics.jsonl").write_text(content)
        assert last_line(folder / "metrics.jsonl", "eval") is None
    assert last_line(tmp_path / "none", "eval") is None


def test_a_page_of_many_runs_is_small_and_draws_each_once(tmp_path):
    for n in range(300):
        make(
            tmp_path / f"run{n}", f"ste({n % 3 + 1},4)", 0.5 + n % 17 / 100, seed=n, flops=(10, 4 + n % 5), tags=["all"]
        )
    page = index.render(tmp_path)
    assert page.count("<use ") == 300
    assert page.count("<tr>") == 301 + 1 + page.count(">◆<")
    fixed = len(index.render(make(tmp_path / "one/run0").parent).encode())
    assert len(page.encode()) - fixed < 300 * 1100


def test_scores_far_away_do_not_flatten_the_picture(tmp_path):
    for n in range(9):
        make(tmp_path / f"run{n}", score=1 + n / 100, metric="loss", flops=(10, 9 - n / 10))
    make(tmp_path / "odd", score=1e6, metric="loss", flops=(10, 9))
    page = index.render(tmp_path)
    assert "The worst scores, of 1 runs, are outside the picture." not in page
    assert "The worst score, of 1 run, is outside the picture." in page
    assert page.count("<use ") == 9


@pytest.mark.slow
def test_a_report_of_a_long_run_is_small(tmp_path, monkeypatch):
    """The points that are drawn have a limit, and each line is parsed once."""
    names = [f"blocks/{n}/mlp" for n in range(24)]
    drawn, parsed, loads = [], [], json.loads
    draw = cv.draw
    monkeypatch.setattr(runs.json, "loads", lambda line: (parsed.append(line), loads(line))[1])
    monkeypatch.setattr(cv, "draw", lambda name, curves, **o: (drawn.extend(curves), draw(name, curves, **o))[1])
    sizes = {}
    for steps in (2000, 20_000):
        drawn.clear()
        parsed.clear()
        folder = write_run(tmp_path / str(steps), lines(steps, names, every=1))
        run = read(folder)
        assert len(parsed) == steps * 3 // 2 + 2  # with run.json and config.json
        sizes[steps] = len(render(run).encode())
        assert max(len(c.values) for c in drawn) <= 502
        assert sum(len(c.values) for c in drawn) < 26_000
    assert sizes[20_000] < 1.2 * sizes[2000] < 1_200_000


# ---- in a browser ----


DRIVER = """
const names = () => [...body.rows].filter(row => !row.hidden).map(row => row.cells[0].textContent);
const steps = {first: names()};
const click = name => [...table.tHead.rows[0].cells].find(head => head.textContent === name).firstChild.click();
click("score"); steps.up = names();
click("score"); steps.down = names();
click("run"); steps.named = names();
field.value = "STE  digits"; field.dispatchEvent(new Event("input")); steps.words = names();
field.value = ""; buttons[0].click(); steps.tag = names();
buttons[1].click(); steps.tags = [...names(), count.textContent];
document.body.append(JSON.stringify(steps));
"""


@pytest.mark.processes
@pytest.mark.skipif(CHROMIUM is None, reason="none of chromium, chromium-browser and google-chrome is on PATH")
def test_a_browser_sorts_and_filters(tmp_path, monkeypatch):
    make(tmp_path / "run10", "ste(2,4)", 0.7, began="2026-01-03T00:00:00", tags=["x", "y"])
    make(tmp_path / "run9", "ste(1,4)", 0.8, began="2026-01-02T00:00:00", tags=["x"])
    make(tmp_path / "run1", "mse(2,4)", 0.9, began="2026-01-01T00:00:00")
    make(tmp_path / "run2", outcome="failed: ste", data="mnist", began="2025-12-31T00:00:00")
    (tmp_path / "run2/metrics.jsonl").unlink()
    script = tmp_path / "index.js"
    script.write_text(index.SCRIPT.read_text() + DRIVER)
    monkeypatch.setattr(index, "SCRIPT", script)
    assert command.main([str(tmp_path)]) == 0
    flags = f"--headless --no-sandbox --disable-gpu --user-data-dir={tmp_path / 'profile'} --virtual-time-budget=2000"
    shown = subprocess.run(
        [CHROMIUM, *flags.split(), "--dump-dom", (tmp_path / "index.html").as_uri()], capture_output=True, timeout=120
    )
    steps = json.loads(re.search(r"(\{[^{}]*\})\s*</body>", shown.stdout.decode())[1])
    assert steps == {
        "first": ["run10", "run9", "run1", "run2"],
        "up": ["run10", "run9", "run1", "run2"],  # the run without a score comes last, whichever way
        "down": ["run1", "run9", "run10", "run2"],
        "named": ["run1", "run2", "run9", "run10"],
        "words": ["run9", "run10"],
        "tag": ["run9", "run10"],
        "tags": ["run10", "1 of 4"],
    }
