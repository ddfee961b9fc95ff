"""Folders of images by class, streamed through grain.

The files are ``train/CLASS/*.jpg`` and ``val/CLASS/*.jpg`` (or test/), or ``CLASS/*.jpg`` without a test split.
"""

import contextlib
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from experiments.data import validation
from experiments.data.images import Images
from experiments.data.order import positions
from experiments.errors import Missing, Mistake
from experiments.files import opened

_SUFFIXES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".webp")
_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP")  # of these suffixes; for other formats Pillow may start programs
_ROW = 100  # so many unreadable files in a row are refused, because more than a few are broken


class Unreadable(Mistake):
    """A file that is no image, or is not complete."""


# Images with more pixels are decoded one at a time: sixteen threads would need sixteen times the memory.
_LARGE, _alone = 1 << 24, threading.Lock()


class Skipped:
    """The files that could not be read and were skipped. Each is reported once, by the thread that meets it first."""

    def __init__(self, tell: Callable[[str], None] = print):
        self.files, self._tell, self._lock = set(), tell, threading.Lock()

    def add(self, file: str, why: BaseException | None) -> None:
        with self._lock:
            if file not in self.files:
                self.files.add(file)
                self._tell(f"{file} cannot be read as an image ({why}): skipped, {len(self.files):,} in all")


def open(dir: str | Path) -> Images:
    """Return the files of a folder in the place of images, and their labels. No image is read yet.

    Classes are numbered in the order of their names. The note says where the test split comes from, if not from val.
    """
    if not dir:
        raise Missing(
            "config.data.name='folder' needs --config.data.dir=DIR, a folder that holds train/CLASS/*.jpg and "
            "val/CLASS/*.jpg, or CLASS/*.jpg."
        )
    root = Path(dir).expanduser()
    if not root.exists():
        raise Missing(f"there is no folder {root}. Give the folder of images by --config.data.dir.")
    train, held = root / "train", [name for name in ("val", "test") if (root / name).is_dir()]
    if not held:
        return _held_out(train if train.is_dir() else root, f"{root} has no folder val or test")
    note = "" if held == ["val"] else f"the test split is the folder {held[0]}"
    note += "; the folder test is not read" if len(held) == 2 else ""
    classes, others = _classes(train), _classes(root / held[0])
    if classes != others:
        odd = _some(sorted(set(classes) ^ set(others)))
        raise Mistake(f"{train} and {root / held[0]} should have the same classes; only one of them has {odd}.")
    return Images("folder", _files(train, classes), _files(root / held[0], classes), tuple(classes), note)


def _held_out(folder: Path, why: str) -> Images:
    """Return the files of one folder of classes. An evenly spaced tenth of each class is the test split."""
    classes = _classes(folder)
    files, labels = _files(folder, classes)
    kept, chosen = validation.positions(labels, 0.1)
    few = np.flatnonzero(np.bincount(labels[kept], minlength=len(classes)) == 0)
    if few.size:
        raise Mistake(f"{folder}: {classes[few[0]]} has too few images to be split. Add images, or remove the folder.")
    train, test = (([files[i] for i in part], labels[part]) for part in (kept, chosen))
    note = f"{why}: an evenly spaced tenth of its images is the test split"
    return Images("folder", train, test, tuple(classes), note)


def _classes(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise Mistake(f"there is no folder {folder}. Put images into train/CLASS/*.jpg and val/CLASS/*.jpg.")
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise Mistake(f"{folder} holds no folders. Put images into one for each class: {folder}/CLASS/*.jpg.")
    return names


def _files(folder: Path, classes) -> tuple[list[str], np.ndarray]:
    own = [
        sorted(entry.path for entry in os.scandir(folder / name) if entry.name.lower().endswith(_SUFFIXES))
        for name in classes
    ]
    empty = [name for name, files in zip(classes, own, strict=True) if not files]
    if empty:
        raise Mistake(f"{folder}: no {', '.join(_SUFFIXES)} in {_some(empty)}. Add images, or remove the folder.")
    return list(itertools.chain(*own)), np.repeat(np.arange(len(own), dtype=np.int32), [len(files) for files in own])


def _some(names) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def stream(
    files: list[str],
    labels: np.ndarray,
    seed: int,
    batch: int,
    size: int,
    start: int = 0,
    train: bool = True,
    threads: int = 16,
    rows: np.ndarray | None = None,
    skipped: Skipped | None = None,
) -> Iterator[dict[str, np.ndarray]]:
    """Yield batches: "image" uint8 (batch, size, size, 3) and "label" int32 (batch,).

    In training they never end, in the order of `positions`, and each is a function of (seed, step) alone: a random part
    of each image, 8 to 100 % of its area and 3:4 to 4:3 in shape, resized (Szegedy et al., arXiv 1409.4842). In
    evaluation every file comes once, in order: the middle square of the image, 224 / 256 of its short side, resized.
    The last batch is filled up with black images of label -1.

    Args:
      files: The files.
      labels: Their labels.
      seed: The seed of the run.
      batch: Number of images in a batch.
      size: Side of the images in pixels.
      start: The first step.
      train: Whether to train or to evaluate.
      threads: Number of threads. Each makes a batch, and as many batches are made in advance.
      rows: The rows of every batch that this process reads; None means all.
      skipped: Notes files that cannot be read. In training the next readable file replaces such a file, image and
        label, so that a batch is still a function of (seed, step) and of the files. In evaluation it becomes a
        black image of label -1. Without ``skipped`` such a file is an error.

    Raises:
      Unreadable: A file cannot be read, and ``skipped`` is None.
      Mistake: 100 files in a row cannot be read.
    """
    import grain

    steps = 2**32 // batch if train else -(-len(files) // batch)
    mine = np.arange(batch) if rows is None else rows

    def sample(p: int, k: int) -> tuple[np.ndarray, int]:
        for other in range(k, k + _ROW if train else k + 1):
            file, label = files[other % len(files)], labels[other % len(files)]
            try:
                return _image(file, size, np.random.default_rng((seed, p)) if train else None), label
            except Unreadable as error:
                if skipped is None:
                    raise
                skipped.add(file, error.__cause__)
        if train:
            raise Mistake(f"{_ROW} files in a row cannot be read, from {files[k]} on. Look at the folder.")
        return np.zeros((size, size, 3), np.uint8), -1

    def make(step) -> dict[str, np.ndarray]:
        place = int(step) * batch + mine
        index = positions(seed, int(step), batch, len(files), np)[1][mine] if train else place
        image, label = np.zeros((len(mine), size, size, 3), np.uint8), np.full(len(mine), -1, np.int32)
        for i, (p, k) in enumerate(zip(place.tolist(), index.tolist(), strict=True)):
            if k < len(files):
                image[i], label[i] = sample(p, k)
        return {"image": image, "label": label}

    batches = grain.MapDataset.range(start, steps).map(make)
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads)))


def _image(file: str, size: int, rng: np.random.Generator | None) -> np.ndarray:
    from PIL import Image

    try:
        with opened(file) as raw, Image.open(raw, formats=_FORMATS) as image:
            full = image.size
            left, top, width, height = _middle(*full) if rng is None else _part(*full, rng)
            if rng is not None:  # decode a JPEG at 1/2, 1/4 or 1/8 of its size, where that is fine enough
                image.draft("RGB", (math.ceil(full[0] * size / width), math.ceil(full[1] * size / height)))
            x, y = image.size[0] / full[0], image.size[1] / full[1]
            box = (left * x, top * y, (left + width) * x, (top + height) * y)
            with _alone if math.prod(image.size) > _LARGE else contextlib.nullcontext():
                eight = image if not image.mode.startswith("I") else Image.fromarray(np.uint8(np.asarray(image) // 257))
                rgb = eight if eight.mode == "RGB" else eight.convert("RGB")
                return np.asarray(rgb.resize((size, size), Image.Resampling.BILINEAR, box))
    except Exception as e:  # Pillow's decoders may raise any error
        raise Unreadable(
            f"{file} cannot be read as an image ({str(e)[:200]}). Replace or remove it, or skip such files by "
            "--config.data.skip=true."
        ) from e


def _middle(width: int, height: int) -> tuple[float, float, float, float]:
    side = min(width, height) * 224 / 256
    return (width - side) / 2, (height - side) / 2, side, side


def _part(width: int, height: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Return left, top, width and height; if ten draws do not fit, the largest middle part of an allowed shape."""
    for _ in range(10):
        area, ratio = width * height * rng.uniform(0.08, 1), math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1)), w, h
    w, h = min(width, max(round(height * 4 / 3), 1)), min(height, max(round(width * 4 / 3), 1))
    return (width - w) // 2, (height - h) // 2, w, h
