"""The benchmark of reports: the runs that it writes are what its tables say."""

import pytest

from experiments.bench import runs
from experiments.report import index, page
from experiments.report.runs import read


@pytest.mark.parametrize("lines", [400, 1000])
def test_a_long_run_has_so_many_lines(tmp_path, monkeypatch, lines):
    monkeypatch.setattr(runs, "LINES", lines)
    size = runs.long_run(tmp_path / "long")
    text = (tmp_path / "long" / "metrics.jsonl").read_bytes()
    assert (len(text), text.count(b"\n")) == (size, lines)
    run = read(tmp_path / "long")
    assert {kind: len(records) for kind, records in run.metrics.items()} == {
        "train": lines * 9 // 10, "eval": lines // 20, "sparsity": lines // 20,
    }  # fmt: skip
    assert not run.complaints
    assert "24 layers" in page.render(run)


def test_all_runs_are_in_the_index(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "RUNS", 30)
    runs.many(tmp_path / "many")
    found = index.entries(tmp_path / "many")
    assert len(found) == 30
    assert all(entry.compared for entry in found)


@pytest.mark.parametrize(
    ("text", "step"),
    [("", 0), ('{"step": 1}\n', 1), ('{"step": 1}\n{"st', 1), ('{"step": 1}\n{"step": 2}\n', 2), ("{", 0)],
)
def test_the_last_whole_line_is_read(tmp_path, text, step):
    (tmp_path / "metrics.jsonl").write_text(text)
    assert runs._last_step(tmp_path / "metrics.jsonl") == step
    assert runs._last_step(tmp_path / "none.jsonl") == 0
