"""The page of a run: what it shows, what it leaves out, and that nothing in it is fetched or executed."""

import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from experiments import report
from experiments.errors import Mistake
from experiments.report import curves as cv, figures
from experiments.report.__main__ import main
from experiments.report.curves import Curve
from experiments.report.examples import mask_pattern
from experiments.report.runs import layers, parse_metrics
from experiments.report.words import duration, large, milliseconds, number, parts_that_differ, percent

HOSTILE = "<script>alert(1)</script>\"'&$x_1$ 語 \x00\ud800"
ABOUT = {
    "name": "vit_24",
    "command": "python launch.py --config=configs/vit_24.py --config.sparsity.mlp='s_ste(2,4)'",
    "began": "2025-11-21T14:26:03+00:00",
    "ended": "2025-11-21T16:20:41+00:00",
    "outcome": "finished",
    "header": [["devices", "2 x CPU"], ["batch", "1,024 = 4 x 256"]],
    "versions": {"python": "3.11.2", "jax": "0.10.2"},
    "git": {"commit": "ebb196d", "dirty": True},
    "unit": "images",
    "metric": "accuracy",
    "notes": ["CIFAR-10 is a lossy JPEG copy here."],
    "summary": [["hardened accuracy", "93.1 %"], ["steps", "2,000"]],
}


def lines(steps=40, names=("mlp/0/up", "mlp/0/down"), every=50):
    """Metrics of a run of images."""
    for i in range(1, steps + 1):
        at = {"step": i * every, "seconds": 2.0 * i}
        loss = 2.3 * math.exp(-i / 10) + 0.1 * (i % 3)
        good = {"learning_rate": 1e-3 / i, "gradient_norm": 1 / i, "per_second": 1000.0 + i, "flops_per_second": 1e12}
        yield {"kind": "train", **at, "loss": loss, "accuracy": 1 - loss / 4, **good}
        if i % 4 == 0:
            hard = {"hardened_loss": loss + 0.1, "hardened_accuracy": 0.9 - loss / 4}
            yield {"kind": "eval", **at, "loss": loss, "accuracy": 0.95 - loss / 4, **hard}
            values = {name: 0.5 * 0.7**i / (n + 1) for n, name in enumerate(names)}
            yield {"kind": "sparsity", **at, "density": dict.fromkeys(names, 0.5), "flip_rate": values}


def write_run(folder, metrics=None, *, about=None, config=None):
    """A run's folder of its three main files."""
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps({**ABOUT, **(about or {})}))
    (folder / "config.json").write_text(json.dumps(config or {"seed": 0, "sparsity": {"mlp": "s_ste(2,4)"}}))
    metrics = lines() if metrics is None else metrics
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    return folder


def image_run(folder, classes=("cat", "dog", "ship"), mask_name="mlp/0/up/kernel"):
    """A run of images with everything that one can write."""
    rng = np.random.default_rng(0)
    mask = np.tile(np.array([1, 0, 0, 1], bool), (40, 60))
    np.savez(
        write_run(folder) / "pictures.npz",
        **{"mask": mask, "mask_name": mask_name, "mask_axis": 1, "mask_m": 4, "classes": np.array(classes)},
        samples=rng.integers(0, 255, (3, 8, 8, 3), np.uint8),
        labels=np.array([0, 1, 2]),
        predictions=np.array([0, 1, 0]),
        confidence=np.array([0.9, 0.5, 0.75], np.float32),
    )
    (folder / "plan.html").write_text("<table><tr><td style='white-space:pre'>y_w=ste(soft(2,4))</td></tr></table>")
    return folder


class Tags(HTMLParser):
    """Return the elements that a browser would make, and what they refer to."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.references, self.ids, self.text, self._style = [], [], [], "", False
        self.feed(page)

    @property
    def links(self):
        """What lies outside the page."""
        return [reference for reference in self.references if not reference.startswith(("#", "data:"))]

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for key, value in attrs:
            assert not key.startswith("on")
            if key in ("src", "href", "srcset", "xlink:href", "action", "data"):
                self.references.append(value)
            if key == "id":
                self.ids.append(value)
            if key in ("style", "clip-path", "fill", "mask"):
                self.references += re.findall(r"url\(([^)]*)", value)

    def handle_data(self, data):
        self.text += data


def written(folder):
    """The page of a folder, which is sound whatever it shows."""
    page = report.write(folder).read_text(encoding="utf-8")
    tags = Tags(page)
    assert set(tags.links) <= {"plan.html"}
    assert {r[1:] for r in tags.references if r.startswith("#")} <= set(tags.ids)
    assert len(set(tags.ids)) == len(tags.ids)
    assert not {"script", "iframe", "object", "embed", "base", "form"} & set(tags.tags)
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)
    assert not re.search("[\x00-\x08\x0e-\x1f]", page)
    return page, tags


def test_a_run_of_images_is_shown_whole(tmp_path):
    page, tags = written(image_run(tmp_path / "run"))
    text = tags.text
    sections = re.findall('<section id="([a-z]+)">', page)
    assert sections == ["learning", "sparsity", "throughput", "plan", "mask", "samples", "again"]
    titles = re.findall("<h3>([^<]*)</h3>", page)
    assert titles == [
        *("Loss", "Accuracy", "Learning rate", "Gradient norm"),
        *("Density", "Flip rate", "Images per second", "FLOP per second"),
    ]
    known = """vit_24 | ✓ finished | 93.1 % | CIFAR-10 is a lossy JPEG copy here. | 1,024 = 4 x 256 | 1 h 54 min
        | Last, at step 2,000: train 0.142, eval 0.142, hardened 0.242. | Best, ringed: hardened | at step 1,800
        | 0.5 in all 2 layers | y_w=ste(soft(2,4)) | 2:4 along axis 1 | a corner of 32 × 96 values
        | 2 of these 3 test images are classified correctly | ✕ cat | is ship | ebb196d, with uncommitted changes
        | sparsity.mlp | s_ste(2,4) | 3.11.2"""
    for said in map(str.strip, known.split("|")):
        assert said in text, said
    assert page.count('role="img"') == 9
    assert page.count("<img ") == page.count('alt="') == 3
    assert 'alt="ship, taken for cat"' in page
    assert len(page) < 200_000


@pytest.mark.parametrize(
    ("about", "share", "split"),
    [
        ({}, 0.1, "validation"),
        ({}, 0, "test"),
        ({}, None, "test"),
        ({"figures": {"accuracy": 0.9, "validation_accuracy": 0.8}}, None, "validation"),
        ({"figures": {"accuracy": 0.9}}, 0.1, "validation"),
    ],
)
def test_captions_say_of_which_split_the_scores_are(tmp_path, about, share, split):
    config = {"data": {} if share is None else {"validation": share}}
    run = write_run(tmp_path / "run", about={"summary": [], **about}, config=config)
    page, tags = written(run)
    captions = [c for c in re.findall("<figcaption>(.*?)</figcaption>", page) if "hardened" in c]
    assert len(captions) == 2  # loss and accuracy
    assert all(f"Scores of the {split} split: eval, hardened." in caption for caption in captions)
    front = "validation " if split == "validation" else ""
    assert f"<dt>{front}hardened accuracy</dt>" in page
    assert f"<dt>{'validation' if front else 'eval'} loss</dt>" in page
    only = [{"step": 1, "seconds": 1.0, "kind": "train", "loss": 1.0}]
    assert "Scores of the" not in written(write_run(tmp_path / "only", only))[0]


def test_the_curve_of_the_baseline_is_beside_that_of_the_run(tmp_path):
    run = image_run(tmp_path / "run")
    assert ">baseline<" not in written(run)[0]
    better = [line | {"hardened_accuracy": 0.99} for line in lines() if line["kind"] == "eval"]
    write_run(run / "baseline", better)
    page, tags = written(run)
    assert "baseline 99 %" in tags.text
    assert "Best, ringed: baseline" not in tags.text
    assert "Best, ringed: hardened" in tags.text  # of the run itself
    assert page.count('class="curve"') == 3 + 3 + 1 + 1 + 2 + 2 + 1 + 1 + 2


def test_an_accuracy_has_the_error_of_its_examples(tmp_path):
    """By hand: the root of 0.975 times 0.025 over 360 is 0.82 points."""
    header = [["data", "digits: 1,293 training images, 144 validation, 360 test; 10 classes"]]
    about = {"header": header, "summary": [["test hardened accuracy", "97.50%"], ["validation accuracy", "97.22%"]]}
    _, tags = written(write_run(tmp_path / "run", about=about))
    assert "test hardened accuracy of 360 images97.50 % ± 0.82" in tags.text
    assert "validation accuracy97.22%" in tags.text
    _, tags = written(write_run(tmp_path / "run", about=about | {"unit": "tokens"}))
    assert "test hardened accuracy97.50%" in tags.text


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, " Values of train are means"),
        ({"data": {"smoothing": 0.1, "flip": True, "mixup": 0.0}}, "has label smoothing 0.1 and random flips;"),
        ({"data": {"crop": 2}, "model": {"dropout": 0.1}, "teacher": {"weights": "w"}},
         "Training has dropout 0.1, random crops and a teacher; evaluations do not."),
        ({"ema": 0.99}, "Evaluations use a moving average of the weights."),
    ],
)  # fmt: skip
def test_why_the_losses_of_training_and_evaluations_differ(tmp_path, config, words):
    text = written(write_run(tmp_path / "run", config=config))[1].text
    assert words in text
    assert ("Training has" in text) == ("has" in words)


def test_the_noise_floor_of_a_bias_is_half_the_root_of_the_variance(tmp_path):
    metrics = [{"kind": "sparsity", "step": s, "seconds": 1.0, "gradient_variance": {"a": 0.04, "b": 0.16},
                "gradient_bias": {"a": 0.1, "b": 0.2}} for s in (1, 2)]  # fmt: skip
    floor = figures.noise_floor(layers(metrics, "gradient_variance"))
    np.testing.assert_allclose(floor.values, (0.1 + 0.2) / 2)
    assert ">noise floor<" in written(write_run(tmp_path / "run", metrics))[0]
    assert figures.noise_floor({}) is None


def test_a_task_of_ones_own_shows_source_reference_and_output(tmp_path):
    run = write_run(tmp_path / "run")
    texts = {"source": ["1 + 1", HOSTILE], "reference": ["2", "b"], "output": ["2"]}
    (run / "text.json").write_text(json.dumps(texts))
    page, tags = written(run)
    assert "What it answers" in tags.text
    assert re.search('<th scope="row">1 . 1</th><td class="words">2</td><td class="words">✓ 2</td>', page)
    (run / "text.json").write_text(json.dumps(texts | {"output": [2]}))
    with pytest.raises(Mistake, match='"output" must be a list of texts'):
        report.write(run)


def test_generated_text_is_shown_after_its_prompt(tmp_path):
    metrics = [{"step": s, "seconds": 1.0, "kind": "eval", "loss": 1 / s} for s in (10, 20)]
    run = write_run(tmp_path / "run", metrics, about={"unit": "tokens", "metric": "loss", "summary": [], "git": None})
    (run / "text.json").write_text(json.dumps({"prompt": "ROMEO:", "samples": ["ROMEO: soft!", "hark\n\n<b>"]}))
    (run / "plan.txt").write_text("layer  slots <dense>\n")
    page, tags = written(run)
    assert re.findall('<section id="([a-z]+)">', page) == ["learning", "plan", "text", "again"]
    assert page.count('<span class="prompt">ROMEO:</span>') == 2
    assert "ROMEO: soft!" in tags.text
    assert "hark\n\n<b>" in tags.text
    assert "slots <dense>" in tags.text
    assert "eval loss0.05" in tags.text, "a run that has not summed itself up shows its last figures"


def test_nothing_of_others_is_markup(tmp_path):
    names = [HOSTILE, f"{HOSTILE}2", "@0@", "step", "curve1"]
    run = image_run(
        tmp_path / "run", classes=(HOSTILE.replace("\x00", "").replace("\ud800", ""), "b", "c"), mask_name="<script>"
    )
    hostile = dict.fromkeys(("name", "command", "unit", "began", "ended"), HOSTILE)
    hostile |= {"outcome": f"failed: {HOSTILE}", "notes": [HOSTILE], "git": {"commit": HOSTILE}}
    hostile |= {key: [[HOSTILE, HOSTILE]] * 9 for key in ("header", "summary")} | {"versions": {HOSTILE: HOSTILE}}
    write_run(run, lines(names=names), about=hostile, config={HOSTILE: {HOSTILE: HOSTILE, "list": [HOSTILE]}})
    (run / "text.json").write_text(json.dumps({"prompt": HOSTILE, "samples": [HOSTILE, "\x1b[31m\u202e"]}))
    page, tags = written(run)
    assert "<script" not in page
    assert page.count("&lt;script&gt;") > 30
    assert {"@0@", "step", "curve1"} <= set(re.findall("<title>([^<]*)</title>", page))
    assert HOSTILE.replace("\x00", "␀").replace("\ud800", "\ufffd") in tags.text


def test_a_line_cut_off_is_passed_over_and_said(tmp_path):
    run = write_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write('{"step": 2050, "kind": "train", "loss": 0.1, "note": "é'.encode()[:-1])
    page, tags = written(run)
    assert "The last line of metrics.jsonl is cut off" in tags.text
    assert "train 0.142" in tags.text
    metrics, said = parse_metrics(
        '{"step": 1, "kind": "train"}\n{"st\n7\n{"step": NaN, "kind": "eval"}\n{"kind": "eval"}'
    )
    assert metrics == {"train": [{"step": 1, "kind": "train"}]}
    assert said[1] == "metrics.jsonl: skipped lines that cannot be read: 2, 3, 4."
    again = ((1, 4), (2, 3), (3, 9), (2, 2), (3, 1))  # a run that went on from a checkpoint
    text = "".join(f'{{"step": {s}, "kind": "train", "loss": {x}}}\n' for s, x in again)
    metrics, said = parse_metrics(text)
    assert [(r["step"], r["loss"]) for r in metrics["train"]] == [(1, 4), (2, 2), (3, 1)]
    assert not said


@pytest.mark.parametrize("text", ["", "\n", '{"step": 1, "ki'])
def test_a_run_that_failed_before_its_first_line(tmp_path, text):
    run = write_run(tmp_path / "run", [], about={"outcome": "failed: no memory", "summary": [], "ended": None})
    (run / "metrics.jsonl").write_text(text)
    page, tags = written(run)
    assert re.findall('<section id="([a-z]+)">', page) == ["again"]
    assert "No metrics were written: the run ended before its first line." in tags.text
    assert "✕ failed" in tags.text
    assert "no memory" in tags.text


def test_only_run_json_is_needed(tmp_path):
    (tmp_path / "run.json").write_text('{"name": "bare"}')
    (tmp_path / "pictures.npz").write_bytes(b"PK\x03\x04 cut")
    page, tags = written(tmp_path)
    for words in ("… running", "No metrics were written yet.", "pictures.npz cannot be read"):
        assert words in tags.text


def test_a_layer_and_its_parameter_share_a_row(tmp_path):
    """Flips are measured of parameters, and the rest of layers. A parameter that no layer has keeps its name."""
    metrics = list(lines())
    for record in metrics:
        if record["kind"] == "sparsity":
            flips = record["flip_rate"]
            record["flip_rate"] = {f"{name}/kernel": value for name, value in flips.items()} | {"other/kernel": 0.1}
    page, tags = written(write_run(tmp_path / "run", metrics))
    assert "The last values of 3 layers" in tags.text
    rows = re.findall(r'<tr><th scope="row">([^<]*)</th><td>([^<]*)</td><td>([^<]*)</td></tr>', page)
    assert [name for name, _, _ in rows] == ["mlp/0/up", "mlp/0/down", "other/kernel"]
    assert all(density and flips for _, density, flips in rows[:2])


def test_what_is_not_finite_is_seen(tmp_path):
    metrics = list(lines(names=[f"layer{n}" for n in range(20)]))
    for record in metrics[5:9] + metrics[-3:]:
        for key in ("loss", "per_second", "learning_rate"):
            record[key] = float("inf")
        if record["kind"] == "sparsity":
            record["flip_rate"]["layer3"] = float("nan")
    page, tags = written(write_run(tmp_path / "run", metrics))
    assert "train ∞, eval ∞" in tags.text
    assert [int(n) for n in re.findall("Not finite: ([0-9]+) values?, × on the axis.</fig", page)] == [5, 4, 2, 4]
    assert "stroke: var(--bad)" in page
    nothing = [{"step": s, "kind": "train", "loss": float("nan")} for s in (1, 2)]
    assert "train NaN" in written(write_run(tmp_path / "none", nothing))[1].text


@pytest.mark.parametrize(
    "values",
    [[0, 0], [5], [1e-45, 1, 3e38], [-1, 1e-9], [0, 1e-30, 1], [1, 1 + 2e-16], [1e99, -1e99], [0.1, np.nan, 7]],
)
@pytest.mark.parametrize("bounds", [(), (0,), (0, 1)])
def test_any_values_can_be_drawn(values, bounds):
    curve = Curve("x", np.arange(len(values), dtype=float), np.array(values, float))
    svg = cv.draw("x", [curve, curve], alt="x", up="y", log=True, bounds=bounds)
    assert svg.count(">x</text>") == 2
    assert "nan" not in svg.lower()


def test_smoothing_and_means(tmp_path):
    values = np.sin(np.arange(10_000) / 9)
    values[8000] = np.nan
    faint, clear = cv.smoothed(Curve("x", np.arange(10_000.0), values))
    assert (len(faint.values), len(clear.values)) == (10_000, 50)
    assert np.isfinite(clear.values).all()
    some = [
        Curve("", np.array([1.0, 2, 4, 5]), np.array([1, np.nan, 3, 7])),
        Curve("", np.array([2.0, 4]), np.array([5.0, 5])),
    ]
    some.append(Curve("", np.array([9.0]), np.array([np.inf])))
    mean = cv.banded(some)
    np.testing.assert_array_equal(
        [mean.values, *mean.band], [[1, 5, 4, 7, np.nan], [1, 5, 3, 7, np.nan], [1, 5, 5, 7, np.nan]]
    )


@pytest.mark.parametrize("count", [501, 747, 10_000])
@pytest.mark.parametrize("broken", [0.0, 0.01, 1.0])
def test_thinning_keeps_the_extremes_of_every_bin(count, broken):
    rng = np.random.default_rng(0)
    values = rng.normal(size=count)
    values[rng.random(count) < broken] = np.inf
    kept = set(cv.thinned(Curve("x", np.arange(count, dtype=float), values)).steps.astype(int).tolist())
    assert {0, count - 1} <= kept
    for part in np.split(np.arange(count), range(0, count, math.ceil(count / 249)))[1:]:
        finite, bad = part[np.isfinite(values[part])], part[np.isinf(values[part])]
        expected = {int(finite[pick(values[finite])]) for pick in (np.argmin, np.argmax) if finite.size}
        assert expected | set(bad[:1].tolist()) <= kept
    assert len(kept) <= 3 * 249 + 2


def test_the_words_for_numbers():
    shown = [number(x) for x in (0, 0.31784, 12000, 1e-5, -2.5e-7, 3e9, float("nan"), -math.inf)]
    assert shown == ["0", "0.318", "12,000", "10⁻⁵", "−2.5·10⁻⁷", "3·10⁹", "NaN", "−∞"]
    assert [large(x) for x in (7, 1500, 1e6, 9.3e13)] == ["7", "1.5k", "1M", "93T"]
    assert [number(999.7), number(-999.7), number(999.4)] == ["1,000", "−1,000", "999"]
    assert [large(x) for x in (999.4, 999.6, 999_400, 999_700, 999.6e9)] == ["999", "1k", "999k", "1M", "1T"]
    assert [percent(x) for x in (0.931, 1)] == ["93.1 %", "100 %"]
    assert [duration(x) for x in (4.2, 61, 3600, 6878, 90061)] == ["4.2 s", "1 min 1 s", "1 h", "1 h 54 min", "1 d 1 h"]
    assert [milliseconds(x) for x in (0.0121, 0.999, 1.44, 75)] == ["12.1 ms", "999 ms", "1.44 s", "1 min 15 s"]
    assert parts_that_differ(["b/0/mlp/up", "b/1/mlp/up"]) == ["0", "1"]
    assert parts_that_differ(["b/0/up", "b/0/down/x", "b"]) == ["b/0/up", "b/0/down/x", "b"]
    assert parts_that_differ(["alone/up"]) == ["alone/up"]


def test_the_pattern_of_a_mask_is_counted():
    mask = np.array([[1, 1, 0, 0, 1, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0, 0, 1, 1]], bool)
    assert mask_pattern(mask[:1], 1, 4) == "2:4"
    assert mask_pattern(mask, 1, 4) == "≤ 2:4"
    assert mask_pattern(mask, 0, 2) == "≤ 2:2"
    assert mask_pattern(mask, 0, 4) == "groups of 4"


@pytest.mark.slow
def test_the_page_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run")
    first, _ = written(run)
    assert written(run)[0] == first, "the same run makes the same page"

    def full(self, text, **options):
        self.touch()
        raise OSError(28, "no space left")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no space"):
        report.write(run)
    assert (run / "report.html").read_text(encoding="utf-8") == first
    assert sorted(os.listdir(run)) == ["config.json", "metrics.jsonl", "report.html", "run.json"]


def test_the_command_prints_where_the_page_is(tmp_path, capsys):
    run = write_run(tmp_path / "run")
    assert main([str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    for wrong in (tmp_path / "tensorboard", tmp_path / "nowhere"):
        assert main([str(wrong)]) == 2
        out, err = capsys.readouterr()
        assert not out
        assert (
            err == f"{wrong} is not the folder of a run or of runs: neither it nor a folder in it has a run.json. "
            "Name the --workdir of a run, or a folder that holds some.\n"
        )
    (run / "run.json").write_text("[1]")
    with pytest.raises(Mistake, match="does not hold a JSON object"):
        report.write(run)
    (run / "run.json").write_text("{")
    with pytest.raises(Mistake, match="cannot be read as JSON"):
        report.write(run)


@pytest.mark.processes
def test_importing_the_report_is_cheap():
    code = "import sys, experiments.report; print(*{'matplotlib', 'PIL', 'jax'} & set(sys.modules))"
    root = Path(report.__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True).stdout == "\n"


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.processes
@pytest.mark.skipif(CHROMIUM is None, reason="none of chromium, chromium-browser and google-chrome is on PATH")
def test_a_browser_shows_it_in_light_and_dark(tmp_path):
    from PIL import Image

    page = report.write(image_run(tmp_path / "run"))
    seen = {}
    for name, scheme in (("dark", 0), ("light", 1)):
        picture = tmp_path / f"{name}.png"
        flags = f"--headless --no-sandbox --disable-gpu --user-data-dir={tmp_path / name} --window-size=1200,2600"
        flags += f" --blink-settings=preferredColorScheme={scheme} --virtual-time-budget=2000 --screenshot={picture}"
        command = [CHROMIUM, *flags.split(), "--hide-scrollbars", "--dump-dom", page.as_uri()]
        dom = subprocess.run(command, capture_output=True, timeout=60, check=True).stdout.decode()
        assert dom.count("<svg") == 10
        assert dom.count('class="curve"') == 3 + 3 + 1 + 1 + 2 + 2 + 1 + 1
        with Image.open(io.BytesIO(picture.read_bytes())) as image:
            seen[name] = np.asarray(image.convert("RGB")).astype(int)
        paper = seen[name][2, 2]
        assert paper.max() < 60 if name == "dark" else paper.min() > 230
    style = (Path(report.__file__).parent / "templates" / "page.css").read_text()
    for colour in ("s0", "s1", "s2"):
        of = dict(zip(("light", "dark"), re.findall(rf"--{colour}: #(\w+)", style), strict=True))
        for name, value in of.items():
            rgb = np.array([int(value[i : i + 2], 16) for i in (0, 2, 4)])
            near = np.abs(seen[name] - rgb).max(-1) < 8
            assert near.sum() > 300, f"{colour} is not drawn in {name}"
            assert np.ptp(np.nonzero(near.any(0))) > 200
