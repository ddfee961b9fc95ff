"""A directory of a run that somebody else sent: what its files hold is shown as text, or refused in a sentence."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest

from experiments import command, config_files, files, report
from experiments.data import folder, labelled
from experiments.errors import Mistake, visible
from experiments.report import index
from experiments.report.words import only_tables
from experiments.training import checkpoints, digest, record, settings
from tests.experiments.report.report_test import CHROMIUM, Tags, write_run

AWAY = '<meta http-equiv="refresh" content="0;url=http://127.0.0.1:9/away">'
PLANS = [
    f"<p>a</p>{AWAY}",
    f"<!-- plan -->{AWAY}<table><tr><td onclick='x()'>b</td></tr></table><!-- end of plan -->",
    "<a href='http://127.0.0.1:9'>c</a><form action='http://127.0.0.1:9'><button>d</button></form>",
    "</div></section></main><base href='http://127.0.0.1:9'><iframe src='http://127.0.0.1:9'></iframe>",
    "<style>body { display: none }</style><script>document.title = 'e'</script><svg onload='x()'>",
    "<p style='position: fixed'>f<img src='http://127.0.0.1:9'><<p>><td <p>g</td<p a='>'>h",
    f"&lt;meta http-equiv=refresh&gt;<table{AWAY}",
]


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_brings_only_tables_into_a_report(tmp_path, plan):
    run = write_run(tmp_path)
    without = [tag for tag, _ in started(report.render(report.read(run), ""))]
    (run / "plan.html").write_text(plan)
    page = report.render(report.read(run), "")
    shown = started(only_tables(plan))
    assert {tag for tag, _ in shown} <= {"table", "thead", "tbody", "tr", "th", "td", "p", "br"}
    assert not any(attributes for _, attributes in shown)
    others = [
        tag for tag, _ in started(page) if tag in ("meta", "a", "form", "base", "iframe", "script", "style", "img")
    ]
    known = [tag for tag in without if tag in ("meta", "a", "form", "base", "iframe", "script", "style", "img")]
    assert len(others) - len(known) in (0, 1)  # the link to the section of the plan
    assert "away" not in Tags(page).references


def started(page):
    """Return the tags of a page, with their attributes, as an HTML parser finds them."""
    import html.parser

    found, parser = [], html.parser.HTMLParser()
    parser.handle_starttag = lambda tag, attributes: found.append((tag, attributes))
    parser.feed(page)
    return found


@pytest.mark.processes
@pytest.mark.skipif(CHROMIUM is None, reason="none of chromium, chromium-browser and google-chrome is on PATH")
def test_a_browser_stays_on_the_report(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "plan.html").write_text(PLANS[1].replace("http://127.0.0.1:9/away", (tmp_path / "away.html").as_uri()))
    (tmp_path / "away.html").write_text("<h1>away</h1>")
    flags = f"--headless --no-sandbox --disable-gpu --user-data-dir={tmp_path / 'user'} --virtual-time-budget=5000"
    address = report.write(run).as_uri()
    shown = subprocess.run(
        [CHROMIUM, *flags.split(), "--dump-dom", address], capture_output=True, timeout=60, check=True
    )
    assert b"<h1>away</h1>" not in shown.stdout
    assert b"<td>b</td>" in shown.stdout


@pytest.mark.parametrize("name", ["run.json", "config.json", "metrics.jsonl", "plan.txt", "plan.html", "text.json"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_only_regular_files_of_a_run_are_read(tmp_path, name, kind):
    run = write_run(tmp_path / "run")
    (run / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(run / name)
    elif kind == "folder":
        (run / name).mkdir()
    else:
        (tmp_path / "secret").write_text('{"secret": 1}')
        (run / name).symlink_to(tmp_path / "secret")
    why = "it is a link to another file" if kind == "link" else "it is not a regular file"
    with pytest.raises(Mistake, match=rf"{name} cannot be read: {why}") as caught:
        report.read(run)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["pipe", "link", "large"])
def test_other_readers_of_a_run_wait_for_no_pipe_follow_no_link_and_have_a_limit(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(files, "LONGEST", 1 << 20)
    (tmp_path / "secret").write_text("{}")
    for name in ("run.json", "config.json", "metrics.jsonl", "checksums.json"):
        if kind == "pipe":
            os.mkfifo(tmp_path / name)
        elif kind == "link":
            (tmp_path / name).symlink_to(tmp_path / "secret")
        else:
            with (tmp_path / name).open("wb") as file:
                file.truncate(1 << 36)
    why = "it (is not a regular|is a link|has more than)"
    assert record.read(tmp_path) is None
    assert checkpoints.read_checksums(tmp_path) is None
    with pytest.raises(Mistake, match=rf"config.json is damaged: {why}"):
        digest.recorded(tmp_path)
    with pytest.raises(Mistake, match=rf"metrics.jsonl cannot be read: {why}"):
        files.lines(tmp_path / "metrics.jsonl")
    if kind != "large":  # a report has a limit of its own, of a GiB
        assert "run.json cannot be read" in " ".join(index.glance(tmp_path).complaints)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    (tmp_path / "a").write_text("123456789")
    assert files.text(tmp_path / "a", 9) == "123456789"
    with pytest.raises(OSError, match="it has more than 8 bytes"):
        files.text(tmp_path / "a", 8)


def test_the_index_follows_no_link(tmp_path):
    for name in ("other", "runs"):
        (tmp_path / name).mkdir()
    write_run(tmp_path / "other/run")
    write_run(tmp_path / "runs/own")
    (tmp_path / "runs/link").symlink_to(tmp_path / "other")
    assert index.find(tmp_path / "runs") == [tmp_path / "runs/own"]


@pytest.mark.parametrize("deep", ["[" * 100_000, "[" * 500 + "]" * 500, '{"a":' * 500 + "1" + "}" * 500])
def test_deep_json_is_refused_in_a_sentence(tmp_path, deep):
    with pytest.raises(ValueError, match="it is nested too deeply"):
        files.of_json(deep)
    assert files.of_json("[" * 64 + "]" * 64)
    (tmp_path / "a.jsonl").write_text(f'{{"text": "a", "label": {deep}}}')
    with pytest.raises(Mistake, match="line 1: this is not JSON") as caught:
        labelled.load(str(tmp_path / "a.jsonl"))
    assert "\n" not in str(caught.value)
    assert files.lines(tmp_path / "a.jsonl") == []


def test_a_loss_that_is_no_number_has_the_strongest_shade(tmp_path):
    run = write_run(tmp_path)
    losses = [["low", 0.0], ["high", 2.0], ["none", float("nan")], ["more", float("inf")]]
    (run / "text.json").write_text(json.dumps({"hardest": [{"loss": float("nan"), "pieces": losses}]}))
    page = report.render(report.read(run))
    assert '</small>low<span class="loss8">highnonemore</span>' in page


def test_large_images_are_decoded_one_at_a_time(tmp_path, monkeypatch):
    from PIL import Image

    monkeypatch.setattr(folder, "_LARGE", 100)
    Image.new("L", (20, 20)).save(tmp_path / "large.png")
    Image.new("L", (10, 10)).save(tmp_path / "small.png")
    at_once, most, convert, lock = set(), {}, Image.Image.convert, threading.Lock()

    def slow(image, *args, **options):
        with lock:
            at_once.add(threading.get_ident())
            most[image.size] = max(most.get(image.size, 0), len(at_once))
        time.sleep(0.05)
        with lock:
            at_once.discard(threading.get_ident())
        return convert(image, *args, **options)

    monkeypatch.setattr(Image.Image, "convert", slow)
    for name in ("large", "small"):
        threads = [
            threading.Thread(target=folder._image, args=(str(tmp_path / f"{name}.png"), 4, None)) for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most[20, 20] == 1
    assert most[10, 10] > 1


@pytest.mark.parametrize(
    "text", ["-" * 20_000 + "1", "sgd(momentum=" + "-" * 20_000 + "1)", "sgd(a={[]: 1})", "(" * 9000]
)
def test_an_odd_optimizer_is_refused_in_a_sentence(text):
    with pytest.raises(Mistake, match="is no call with named options") as caught:
        settings.call(text, "config.optimizer")
    assert len(str(caught.value)) < 400


def test_a_share_of_four_hundred_nines_is_refused():
    with pytest.raises(Mistake, match="is no share of a run"):
        settings.in_steps(f"mdgf(2,4,linear(1,0,{'9' * 400}%))", 100)
    with pytest.raises(Mistake, match="is not a duration"):
        settings.duration(f"{'9' * 400}%", 100, "config.evaluate")


ODD = [None, True, 1, 1.5, 10**400, "x", [], [1], {}, {"a": 1}, [[1]], [["a"]], [["a", None]]]


@pytest.mark.slow
@pytest.mark.parametrize("file", ["vit_24.py:smoke", "gpt_24.py:smoke", "finetune_24.py:smoke"])
def test_every_odd_field_of_a_recorded_config_is_read_or_refused(tmp_path, file):
    """A field that is missing or of another type is refused."""
    good = json.loads(config_files.load(f"configs/{file}").to_json())
    read, refused, said = 0, 0, set()
    groups = [(good, ()), *((value, (name,)) for name, value in good.items() if isinstance(value, dict))]
    for group, path in groups:
        for name in group:
            for odd in ODD:
                changed = json.loads(json.dumps(good))
                (changed[path[0]] if path else changed)[name] = odd
                (tmp_path / "config.json").write_text(json.dumps(changed))
                try:
                    command.read(["launch.py", "--mode=eval", f"--workdir={tmp_path}"])
                    read += 1
                    if path != ("model",) and path != ("sparsity",):
                        like = group[name]
                        number = isinstance(like, float) and type(odd) in (int, float)
                        assert number or type(odd) is type(like), (path, name, odd)
                except Mistake as error:
                    refused += 1
                    said.add(str(error))
    assert not [sentence for sentence in said if "\n" in sentence or len(sentence) > 600]
    assert read > 50
    assert refused > 200
    for whole in ("[1]", "3", "null", '"a"', "{}", "[" * 9000):
        (tmp_path / "config.json").write_text(whole)
        with pytest.raises(Mistake, match="config.json is damaged"):
            command.read(["launch.py", "--mode=eval", f"--workdir={tmp_path}"])


@pytest.mark.parametrize("file", config_files.names())
def test_what_config_files_make_is_read_again(tmp_path, file):
    (tmp_path / "config.json").write_text(config_files.load(file).to_json())
    asked = command.read(["launch.py", "--mode=eval", f"--workdir={tmp_path}"])
    assert digest.identity(asked.config).fields.keys() == digest.identity(config_files.load(file)).fields.keys()


@pytest.mark.slow
def test_a_terminal_gets_no_control_characters(tmp_path):
    assert visible("a\x1b[31mb\x07\x9b\td\n") == "a␛[31mb␇\ufffd\td\n"
    config = json.loads(config_files.load("configs/vit_24.py:smoke").to_json())
    config["model"]["name"] = "evil\x1b]0;title\x07:Boom"
    config["sparsity"] = {"blocks": "y_w=evil:\x1b[31m"}
    config["optimizer"] = "\x1b[31m:x"
    run = tmp_path / "a\x1b[31m"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(config))
    words = [sys.executable, "launch.py", "--mode=eval", f"--workdir={run}"]
    done = subprocess.run(words, cwd=config_files.ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "\x1b" not in done.stdout + done.stderr
    shutil.rmtree(run)
    done = subprocess.run(words, cwd=config_files.ROOT, capture_output=True, text=True)
    assert "\x1b" not in done.stdout + done.stderr
    assert "␛[31m" in done.stderr
