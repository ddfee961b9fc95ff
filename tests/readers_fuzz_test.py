"""Every reader of files and texts gives a value or one sentence, whatever bytes it is given, within time and memory.

Each reader gets a small valid file that is changed at random. How many cases there are depends on the machine, but the
case of a number is always the same: a failure names the numbers, and ``contents(good, number)`` gives the bytes.
"""

import contextlib
import gzip
import json
import lzma
import random
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import nmjax as nm
from experiments import command, config_files, files, recorded, report
from experiments.data import folder, images, labelled, published, text
from experiments.errors import Mistake
from experiments.training import settings
from nmjax import checkpoints
from nmjax.checkpoints import gguf, torch_files
from nmjax.oneshot import texts
from tests.checkpoints.gguf_test import write as write_gguf
from tests.experiments.data.images_test import cifar_arrays, cifar_files, idx_bytes, tar

SECONDS = 4  # for each reader
SLOWEST = 5  # seconds of one case
MEMORY = 3 << 30  # bytes that one case may ask for, beside those of the process
LONGEST = 1500  # characters of a sentence
GOLDEN = Path(__file__).parent / "checkpoints/golden"
HUGE = [b"9" * 400, b"9" * 5000, b"1e999", b"-1", b"18446744073709551616", b"NaN", b"0", b"null", b'""', b"[]", b"{}"]


class Reader(NamedTuple):
    """A reader of files.

    Attributes:
      name: The name of its files.
      good: Writes a valid file at a path.
      read: Reads the file at a path.
      errors: What it may raise.
    """

    name: str
    good: Callable[[Path], Any]
    read: Callable[[Path], Any]
    errors: tuple[type[Exception], ...] = (Mistake,)


def of_text(*lines: str) -> Callable[[Path], Any]:
    return lambda path: path.write_text("\n".join(lines))


def of_bytes(data: bytes) -> Callable[[Path], Any]:
    """Write bytes, packed as the name of the file says."""
    pack = {".gz": gzip.compress, ".xz": lzma.compress}
    return lambda path: path.write_bytes(data if data[:2] == b"\x1f\x8b" else pack.get(path.suffix, bytes)(data))


def picture(kind: str) -> Callable[[Path], Any]:
    from PIL import Image

    return lambda path: Image.fromarray(np.arange(3600, dtype=np.uint8).reshape(30, 40, 3)).save(path, kind)


def packed(path: Path) -> None:
    np.savez(path, x=np.zeros((20, 4, 4, 1), np.uint8), y=np.arange(20) % 2)


def recorded_config() -> str:
    return config_files.load("configs/vit_24.py:smoke").to_json()


def evaluated(path: Path) -> None:
    """Read the config of a run as --mode=eval does, and make of it what needs no data."""
    config = command.read(["launch.py", "--mode=eval", f"--workdir={path.parent}"]).config
    total = settings.steps(config, 1000)
    settings.recipe(config, total)
    settings.optimizer(config, settings.learning_rate(config, total), total)


def reported(path: Path) -> None:
    if path.name != "run.json":
        path.with_name("run.json").write_text('{"name": "a run", "outcome": "finished"}')
    report.render(report.read(path.parent))


def in_full(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    return lambda path: [np.asarray(value).sum() for value in read(path).values()]


def tokenised(path: Path) -> None:
    path.with_name("tale.txt").write_text("hello world\nabab\n" * 9)
    text.load("tale", path.parent, tokenizer=str(path))


def called(path: Path) -> None:
    settings.call(settings.in_steps(path.read_text(errors="replace"), 100), "config.optimizer")


ABOUT = {"name": "a", "outcome": "finished", "metric": "accuracy", "figures": {"accuracy": 0.5}, "steps": 10}
ABOUT |= {"flops": [1.0, 2.0], "summary": [["a", "b"]], "header": [["a", "b"]], "notes": ["n"], "git": {"commit": "a"}}
LINES = [
    json.dumps({"kind": kind, "step": n, "seconds": n / 2, "loss": 1.0}) for n in range(3) for kind in ("train", "eval")
]
LABELLED = [json.dumps({"text": f"text {n}", "text_b": "b", "label": n % 2}) for n in range(4)]
WINDOWS = {"prompt": "a", "samples": ["ab"], "hardest": [{"loss": 1.0, "pieces": [["a", 1.0], ["b", None]]}]}
WORDS = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
PLAN = "<!-- plan --><table><tr><th>a</th></tr><tr><td>ste(2,4)</td></tr></table><p>b</p><!-- end of plan -->"
RESULTS = config_files.ROOT / "experiments/results/held_vit_cpu.jsonl"
GGUF = {"w": ("F32", (8,), np.arange(8, dtype=np.float32).tobytes())}
CHECKPOINT = (checkpoints.CheckpointError, OSError)

READERS = {
    "methods": Reader(
        "a.txt",
        of_text("s_ste(2,4); dx_g=chain(mse(2,4),fp8('e4m3')); y_w=ste(hold(mse(2,4),every=9)) else dense"),
        lambda path: nm.parse(path.read_text(errors="replace"), foreign=False),
        (ValueError,),
    ),
    "pruners": Reader(
        "a.txt",
        of_text("ste(stages(((0,identity),(100,hold(mse(2,4),every=10)))))"),
        lambda path: nm.parse_pruner(path.read_text(errors="replace"), foreign=False),
        (ValueError,),
    ),
    "optimizers": Reader("a.txt", of_text("adamw(b1=0.9, b2=-0.999, weight_decay=5e-2, after=10%)"), called),
    "configs": Reader("config.json", of_text(recorded_config()), evaluated),
    "run.json": Reader("run.json", of_text(json.dumps(ABOUT)), reported),
    "metrics": Reader("metrics.jsonl", of_text(*LINES), reported),
    "windows": Reader("text.json", of_text(json.dumps(WINDOWS)), reported),
    "plans": Reader("plan.html", of_text(PLAN), reported),
    "lines": Reader("a.jsonl", of_text(*LINES), files.lines),
    "results": Reader(RESULTS.name, of_text(*RESULTS.read_text().splitlines()[:2]), recorded.read),
    "labelled": Reader("a.jsonl", of_text(*LABELLED), lambda path: labelled.load(str(path))),
    "arrays": Reader("a.npz", packed, lambda path: images.load(str(path))),
    **{
        f"idx{end}": Reader(f"a-idx3{end}", of_bytes(idx_bytes(np.zeros((3, 4, 5), np.uint8))), published._idx_array)
        for end in ("", ".gz")
    },
    "cifar": Reader("cifar-10-binary.tar.gz", of_bytes(tar(cifar_files(cifar_arrays()))), published.cifar10),
    **{
        end: Reader(f"a.txt{end}", of_bytes(b"a text of some lines\n" * 40), lambda path: text.load(str(path)))
        for end in (".gz", ".xz")
    },
    **{
        kind: Reader("a.jpg", picture(kind), lambda path: folder._image(str(path), 16, None))
        for kind in ("JPEG", "PNG", "GIF", "BMP", "WEBP")
    },
    "texts": Reader("a", of_text("a text", "another"), lambda path: texts.read_texts(path, 9), (ValueError, OSError)),
    "json texts": Reader("a.jsonl", of_text(*LABELLED), lambda path: texts.read_texts(path, 9), (ValueError, OSError)),
    "tokenizers": Reader(
        "tokenizer.json", of_text((GOLDEN / "bert/tokenizer.json").read_text()), texts.tokenizer, (ValueError, OSError)
    ),
    "tokens": Reader("words.json", of_text(json.dumps({"version": "1.0", "model": WORDS})), tokenised),
    "safetensors": Reader(
        "model.safetensors",
        lambda path: checkpoints.write(path, {"w": np.eye(8, dtype=np.float32), "b": np.zeros(8, np.float16)}),
        in_full(checkpoints.read), CHECKPOINT,
    ),
    "GGUF": Reader("a", lambda path: write_gguf(path, {"a": [1, 2], "b": "c"}, GGUF), in_full(gguf.Gguf), CHECKPOINT),
    "torch": Reader("a.bin", lambda path: path.write_bytes(b"\x80\x02}q\x00."), torch_files.read, CHECKPOINT),
}  # fmt: skip


def changed(rng: random.Random, data: bytes) -> bytes:
    """Return bytes that are changed in one to four places."""
    new = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        i = rng.randrange(min(len(new), rng.choice([64, 600, 10**9])) or 1)
        how = rng.randrange(8)
        if how == 0 and new:
            new[min(i, len(new) - 1)] ^= 1 << rng.randrange(8)
        elif how == 1:
            del new[i:]
        elif how == 2:
            new[i : i + 8] = struct.pack("<Q", rng.choice([0, 1, 2**31, 2**32 - 1, 2**62, 2**64 - 1]))
        elif how == 3:
            new[i:i] = data[rng.randrange(len(data)) :][: rng.choice([4, 40, 400])]
        elif how == 4:
            new[i : i + rng.choice([0, 1, 4])] = rng.choice([b"[", b'{"a":', b"(", b"-", b"ste("]) * rng.choice(
                [9, 9000, 30_000]
            )
        elif how == 5:
            new[i:i] = rng.choice([b"\x1b[31m", b"\xff", b"\x00", b"\r\n", b"\\ud800", b"'", b'"', b"%", b";"])
        else:  # a number, or a value of JSON, becomes another one
            places = [n for n, c in enumerate(new) if chr(c).isdigit() or c in b'"[']
            at = rng.choice(places or [i])
            new[at : at + rng.choice([1, 1, 4])] = rng.choice(HUGE)
    return bytes(new)


def contents(good: bytes, number: int) -> bytes:
    """Return the bytes of the case of a number."""
    return changed(random.Random(number), good) if number else good


@contextlib.contextmanager
def limited():
    """Limit the memory that may be asked for."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def tried(reader: Reader, path: Path) -> bool:
    """Return whether a file is read; False if it is refused in a sentence."""
    began = time.process_time()
    try:
        reader.read(path)
        return True
    except reader.errors as error:
        said = str(error)
        assert said.strip(), "nothing is said"
        assert "\n" not in said, said[:300]
        assert len(said) <= LONGEST, f"{len(said)} characters: {said[:300]}"
        return False
    finally:
        took = time.process_time() - began
        assert took < SLOWEST, f"{took:.0f} seconds"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Pillow and of NumPy, about what they read
@pytest.mark.parametrize("name", READERS)
def test_a_reader_reads_or_refuses_in_a_sentence(name, tmp_path, monkeypatch):
    if name.startswith("token"):
        pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    reader, path = READERS[name], tmp_path / READERS[name].name
    reader.good(path)
    good = path.read_bytes()
    fine, number, end, failed = 0, 0, time.monotonic() + SECONDS, {}
    with limited():
        while time.monotonic() < end:
            path.write_bytes(contents(good, number))
            try:
                fine += tried(reader, path)
            except Exception as error:  # of another type than the reader's own, or an assertion above
                failed.setdefault(f"{type(error).__name__}: {str(error)[:200]}", number)
            assert fine or number or name in ("torch", "results"), "the valid file is refused"
            number += 1
    print(f"{name}: {number:,} files, {fine:,} read and {number - fine:,} refused")
    assert number > 20
    assert fine < number or name in ("metrics", "plans", "lines")  # which leave out what they cannot read
    assert not failed, f"the first case of each: {failed}"
