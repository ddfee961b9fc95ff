"""Data sets fetched from a server on this machine: whole, in parts, and with errors of servers and disks."""

import fcntl
import gzip
import hashlib
import http.server
import os
import re
import threading

import numpy as np
import pytest

from experiments.data import __main__ as command, fetch, images, published
from experiments.errors import Failed, Mistake
from tests.experiments.data.images_test import idx_bytes, mnist_arrays

DATA = np.random.default_rng(0).integers(0, 256, 500_000, dtype=np.uint8).tobytes()
FILE = published.File("a.bin", len(DATA), hashlib.md5(DATA).hexdigest())


class Server(http.server.BaseHTTPRequestHandler):
    """Gives the files of `held`. `manner` says what it does wrong."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        held, manner = self.server.held.get(self.path), self.server.manner
        self.server.asked.append((self.path, self.headers["Range"]))
        if held is None:
            self.send_error(404)
            return
        start, self.close_connection = 0, True
        if self.headers["Range"] and manner != "sends the whole file":
            start = int(re.fullmatch(r"bytes=(\d+)-", self.headers["Range"])[1])
            self.send_response(206)
            wrong = 7 if manner == "gives another range" else 0
            self.send_header("Content-Range", f"bytes {start + wrong}-{len(held) - 1}/{len(held)}")
        else:
            self.send_response(200)
        if manner != "gives no length":
            self.send_header("Content-Length", str(len(held) - start))
        self.end_headers()
        breaks = manner == "breaks off" and len(self.server.asked) < 4
        self.wfile.write(held[start : start + 100_000] if breaks else held[start:])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(fetch, "WAIT", 0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    made.daemon_threads, made.handle_error = False, lambda *_: None  # a client that has enough closes early
    made.held, made.manner, made.asked = {"/a.bin": DATA}, "", []
    made.address = f"http://127.0.0.1:{made.server_port}/"
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def fetched(server, path, addresses=None):
    shown = []
    fetch.fetch(addresses or [f"{server.address}a.bin"], FILE, path, lambda *what: shown.append(what))
    assert path.read_bytes() == DATA
    assert os.listdir(path.parent) == [path.name]
    assert shown[-1] == ("a.bin", len(DATA), len(DATA))
    return [start for _, start in server.asked]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("there", "manner", "asked"),
    [
        (None, "", [None]),
        (None, "gives no length", [None]),
        (None, "breaks off", [None, "bytes=100000-", "bytes=200000-", "bytes=300000-"]),
        (DATA[:123_456], "", ["bytes=123456-"]),  # of an earlier command
        (DATA[:123_456], "gives another range", ["bytes=123456-", None]),  # it begins again
        (b"?" * 123_456, "sends the whole file", ["bytes=123456-"]),
    ],
)
def test_a_file_is_fetched_once_and_what_broke_off_is_continued(server, tmp_path, there, manner, asked):
    if there:
        (tmp_path / "a.bin.part").write_bytes(there)
    server.manner = manner
    assert fetched(server, tmp_path / "a.bin") == asked
    assert fetched(server, tmp_path / "a.bin") == asked  # it is there


@pytest.mark.slow
def test_another_address_is_asked(server, tmp_path):
    fetched(server, tmp_path / "a.bin", [f"{server.address}nowhere/a.bin", f"{server.address}a.bin"])
    assert [path for path, _ in server.asked] == ["/nowhere/a.bin", "/a.bin"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("held", "manner", "why"),
    [
        (DATA[:-1] + b"?", "", "what arrived is not a.bin: its MD5 is [0-9a-f]{32}, not .*. It has been removed"),
        (DATA[:-1], "", "it is 499,999 bytes long, not 500,000"),
        (DATA * 9, "gives no length", "it is longer than 500,000 bytes"),
        (b"<html>", "", "it is 6 bytes long"),
    ],
)
def test_another_file_is_refused(server, tmp_path, held, manner, why):
    server.held["/a.bin"], server.manner = held, manner
    with pytest.raises(Failed, match=why):
        fetched(server, tmp_path / "a.bin")
    assert [path for path in tmp_path.iterdir() if path.stat().st_size] == []


def test_what_arrived_is_kept_when_it_cannot_be_continued(server, tmp_path):
    (tmp_path / "a.bin.part").write_bytes(DATA[:1000])
    del server.held["/a.bin"]
    with pytest.raises(Failed) as error:
        fetched(server, tmp_path / "a.bin")
    assert str(error.value) == (
        "cannot fetch a.bin from 127.0.0.1 (Not Found): 1,000 of 500,000 bytes are kept, and the same command "
        "continues. On a machine without a network, copy the file from another machine."
    )
    assert (tmp_path / "a.bin.part").read_bytes() == DATA[:1000]


def test_without_a_network(monkeypatch, tmp_path):
    monkeypatch.setattr(fetch, "WAIT", 0)
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(Failed, match=r"cannot fetch a.bin from no.invalid \(.+\): try again later. On a machine"):
        fetch.fetch(["https://no.invalid/a.bin"], FILE, tmp_path / "a.bin", lambda *_: None)


def test_a_file_that_is_there_is_not_replaced(server, tmp_path):
    (tmp_path / "a.bin").write_bytes(b"mine")
    with pytest.raises(Mistake, match="a.bin exists, but is not the published file. Remove it"):
        fetched(server, tmp_path / "a.bin")
    (tmp_path / "a.bin").unlink()
    with (tmp_path / "a.bin.part").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Mistake, match="another process is fetching"):
            fetched(server, tmp_path / "a.bin")


@pytest.mark.slow
def test_the_command_gets_what_a_run_then_finds(server, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("NMJAX_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Mistake, match="python -m experiments.data get mnist"):
        images.load("mnist")
    files = []
    for file, array in zip(fetch.SETS["mnist"].files, mnist_arrays("mnist"), strict=True):
        server.held[f"/{file.name}"] = data = gzip.compress(idx_bytes(array))
        files.append(published.File(file.name, len(data), hashlib.md5(data).hexdigest()))
    ours = fetch.SETS["mnist"]._replace(addresses=(server.address,), files=tuple(files))
    monkeypatch.setitem(fetch.SETS, "mnist", ours)
    assert command.main(["get", "mnist"]) == 0
    said = capsys.readouterr()
    assert "mnist is in mnist. Train: python launch.py --config=configs/vit_24.py:mnist\n" in said.out
    assert len(said.err.splitlines()) == 4
    assert len(images.load("mnist").train[1]) == 30
    assert command.main(["get", "mnist", "--dir=here"]) == 0
    assert "configs/vit_24.py:mnist --config.data.dir=here" in capsys.readouterr().out
    monkeypatch.setenv("NMJAX_DATA", str(tmp_path / "env"))
    server.held.clear()
    assert command.main(["get", "mnist"]) == 1
    assert (tmp_path / "env" / "mnist").is_dir()
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    (tmp_path / "file").touch()
    assert command.main(["get", "mnist", "--dir=file"]) == 2
    assert "file/mnist cannot be written" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        command.main(["get", "imagenet"])
    assert left.value.code == 2
