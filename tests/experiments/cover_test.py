"""The picture of the first page, and the ratios on the first pages."""

import re

import numpy as np

import nmjax as nm
from experiments import cover
from experiments.config_files import ROOT


def test_the_first_pages_have_the_ratios_that_were_recorded():
    for share in cover.measured().values():
        for page in ("docs/hardware.md", "experiments/results/cover.svg"):
            assert re.search(rf"\b{share:.2f}\b", (ROOT / page).read_text()), (page, share)
    product, block, _ = cover.measured().values()
    assert f"{block:.2f}" in (text := (ROOT / "README.md").read_text())
    assert f"{product:.2f}" in text


def test_a_larger_weight_has_a_stronger_colour_and_a_zero_none():
    picture = nm.show(np.array([[4.0, -2.0, 0.0, 0.0]]), m=4)
    shades = [
        float(shade) for cell in cover.cells(picture, 0, 0) for shade in re.findall(r"fill-opacity='([\d.]+)'", cell)
    ]
    assert shades[0] == 1
    assert shades[0] > shades[1] > shades[2] == shades[3] == 0
