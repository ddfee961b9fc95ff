"""Writing that is killed anywhere. A process of its own dies at each renaming, and while it writes."""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nmjax.checkpoints import CheckpointError, drafts, load, read, write

ROOT = Path(__file__).parents[2]
NAMES = ("a.safetensors", "b.safetensors", "1_Pooling/config.json", "model.safetensors.index.json", "config.json")
WRITE = """
import importlib.util, os, sys
from pathlib import Path

spec = importlib.util.spec_from_file_location("drafts", sys.argv[1])  # without the rest, which takes seconds
drafts = importlib.util.module_from_spec(spec)
spec.loader.exec_module(drafts)
target, left = Path(sys.argv[2]), int(sys.argv[3])

def killed(call):
    def rename(*places):
        global left
        if not left:
            os._exit(9)
        left -= 1
        return call(*places)
    return rename

os.replace, os.rename = killed(os.replace), killed(os.rename)
if sys.argv[4:]:
    with drafts.replacing_all(target, sys.argv[4:]) as files:
        for name, file in zip(sys.argv[4:], files):
            file.write(b"new " + name.encode())
        if left == 99:
            os._exit(9)
else:
    with drafts.replacing(target) as file:
        file.write(b"new")
        if left == 99:
            os._exit(9)
"""


def written(target, left, *names):
    """Write in a process that dies at a renaming, 99 for while it writes. Return whether it died."""
    argv = [sys.executable, "-c", WRITE, drafts.__file__, target, str(left), *names]
    status = subprocess.run(argv, check=False).returncode
    assert status in (0, 9)
    return status == 9


def content(folder):
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


def visible(folder):
    return {name: text for name, text in content(folder).items() if not name.startswith(".")}


NEW = {name: f"new {name}" for name in NAMES}
OLD = {name: f"old {name}" for name in NAMES}


@pytest.mark.parametrize("left", [99, 0])
def test_a_new_folder_is_there_whole_or_not_at_all(left, tmp_path):
    target = tmp_path / "deep/out"
    assert written(target, left, *NAMES)
    assert not target.exists()
    assert len(list(target.parent.iterdir())) == 1  # the draft
    (target.parent / ".other.01234567.draft").mkdir()  # of another folder
    assert not written(target, 50, *NAMES)
    assert content(target) == NEW
    assert {path.name for path in target.parent.iterdir()} == {"out", ".other.01234567.draft"}


@pytest.mark.parametrize("left", [99, *range(1 + len(NAMES))])
@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("more", [{}, {"mine.txt": "mine"}])
def test_a_folder_that_was_there_is_old_or_new_or_no_checkpoint(left, old, more, tmp_path):
    """The files that were there beside stay. What was begun is finished by whoever writes next, also other files."""
    target = tmp_path / "out"
    before = (OLD if old else {}) | more
    for name, text in (before or {"x": ""}).items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(text)
    (target / "x").unlink(missing_ok=True)
    assert written(target, left, *NAMES)
    found = visible(target)
    if left in (99, 0):
        assert found == before
    else:
        assert "config.json" not in found
        assert more.items() <= found.items()
        assert all(text in (OLD[name], NEW[name]) for name, text in found.items() if name not in more)
        for reader in (load, read):  # one file of several may look like a whole checkpoint
            with pytest.raises(CheckpointError, match=r"out: a process replaces this checkpoint, or was killed while"):
                reader(target)
    drafts.finish(target)
    whole = left not in (99, 0)
    assert content(target) == (before | NEW if whole else before)
    assert not written(target, 50, *NAMES)
    assert content(target) == before | NEW
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_finishing_can_be_killed_too(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    written(target, 1, *NAMES)
    for _ in range(1, len(NAMES)):
        assert written(target, 1, *NAMES)  # it moves one file more, and dies
    assert not written(target, 50, *NAMES)
    assert content(target) == NEW


def test_a_folder_whose_last_file_is_in_place_can_be_read(tmp_path):
    """The process died when it took its empty draft away."""
    (tmp_path / "out/.out.01234567.whole/1_Pooling").mkdir(parents=True)
    write(tmp_path / "out/model.safetensors", {"w": np.ones(3)})
    assert read(tmp_path / "out")["w"].tolist() == [1, 1, 1]
    drafts.finish(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("left", [99, 0])
def test_a_file_is_old_or_new(left, tmp_path):
    """The files of a folder beside it stay, also if a draft that is whole would replace them."""
    (tmp_path / "a.onnx").write_text("old")
    assert written(tmp_path / "a.onnx", left)
    assert visible(tmp_path) == {"a.onnx": "old"}
    assert len(content(tmp_path)) == 2
    whole = f".{tmp_path.name}.01234567.whole"
    (tmp_path / whole).mkdir()
    (tmp_path / whole / "b.onnx").write_text("of another")
    assert not written(tmp_path / "a.onnx", 50)
    assert content(tmp_path) == {"a.onnx": "new", f"{whole}/b.onnx": "of another"}


def test_a_draft_of_a_living_process_is_left_alone(tmp_path):
    """Also if it was written for the same folder. Links are left alone too."""
    for place in (tmp_path / ".out.01234567.draft", tmp_path / "out/.out.01234567.whole"):
        place.mkdir(parents=True)
        (place / "config.json").write_text("of the other")
    (tmp_path / ".out.76543210.draft").symlink_to(tmp_path)
    held = [os.open(path, os.O_RDONLY) for path in (tmp_path / ".out.01234567.draft", place)]
    for one in held:
        fcntl.flock(one, fcntl.LOCK_EX)
    assert not written(tmp_path / "out", 50, *NAMES)
    assert visible(tmp_path / "out") == NEW
    assert len([path for path in tmp_path.rglob("config.json") if path.read_text() == "of the other"]) == 2
    for one in held:
        os.close(one)
    drafts.finish(tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.76543210.draft"}
    assert (tmp_path / "out/config.json").read_text() == "of the other"


def test_a_link_to_a_folder_stays_one(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to("real")
    assert not written(tmp_path / "out", 50, *NAMES)
    assert (tmp_path / "out").is_symlink()
    assert content(tmp_path / "real") == NEW


def test_a_folder_whose_parent_may_not_be_listed(tmp_path, monkeypatch):
    """Then nothing can be looked for there, and writing is possible."""
    (tmp_path / "out").mkdir()
    listed = Path.iterdir

    def refused(path):
        if path == tmp_path:
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", refused)
    with drafts.replacing_all(tmp_path / "out", ["a.txt"]) as (file,):
        file.write(b"a")
    write(tmp_path / "b.safetensors", {})
    assert (tmp_path / "out/a.txt").read_text() == "a"


PAIR = ("config.json", "model.safetensors")
COMMANDS = f"""
PAIR = {PAIR}
"""
COMMANDS += """
import hashlib, json, os, sys
from pathlib import Path
from nmjax.__main__ import main

def run(argv, left):
    pid = os.fork()
    if not pid:  # nothing has used a device yet, so there are no threads
        os.dup2(2, 1)
        def killed(call):
            def rename(*places, count=[left]):
                if not count[0]:
                    os._exit(9)
                count[0] -= 1
                return call(*places)
            return rename
        os.replace = os.rename = killed(os.rename)
        os._exit(main(argv))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

found = []
for argv, left in json.loads(sys.argv[1]):
    status = run(argv, left)
    folder = Path(argv[-1])
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    beside = sorted(path.name for path in folder.parent.iterdir())
    files = [hashlib.sha256((folder / name).read_bytes()).hexdigest() if name in names else None for name in PAIR]
    found.append((status, names, beside, files))
print(json.dumps(found))
"""


@pytest.mark.processes
def test_a_command_that_is_killed_can_be_given_again(tmp_path):
    """Into no folder, and over another model: at the renaming of the folder, of its first file and of its last one."""
    golden = ROOT / "tests/checkpoints/golden"
    prune = lambda folder, *more: [
        "prune", str(golden / "bert"), "--method", "magnitude", *more, "--out", str(tmp_path / folder / "out"),
    ]  # fmt: skip
    notes, files = 2, 4  # how often the note of an unfinished copy is renamed; that note is the first of the files
    kills = {"folder": notes, "first": notes + 1, "last": notes + files}
    plan = [(prune("new"), notes), (prune("new"), 99)]
    for name, renamings in kills.items():
        shutil.copytree(golden / "bert-classifier", tmp_path / name / "out", ignore=shutil.ignore_patterns("expected"))
        plan += [(prune(name, "--overwrite"), renamings), (prune(name, "--overwrite"), 99)]
    argv = [sys.executable, "-c", COMMANDS, json.dumps(plan)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    new, right, *others = json.loads(done.stdout)
    assert (new[0], new[1], new[3]) == (9, [], [None, None])
    assert (right[0], right[1]) == (0, ["config.json", "model.safetensors", "tokenizer.json"])
    old = [hashlib.sha256((golden / "bert-classifier" / name).read_bytes()).hexdigest() for name in PAIR]
    for name, killed, again in zip(kills, others[::2], others[1::2], strict=True):
        assert killed[0] == 9
        assert killed[3] == old if name == "folder" else killed[3][0] is None
        assert (killed[3][1] == right[3][1]) == (name == "last")
        assert again == right
