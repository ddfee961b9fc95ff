"""The intervals that pages of the site name are those of the committed results."""

import itertools
import re

import pytest

from experiments import claims, config_files, reproduce
from experiments.report import effects
from experiments.studies import STUDIES, WORSE

INTERVAL = re.compile(r"\[([+−]?\d\.\d{3,4}),\s+([+−]?\d\.\d{3,4})\]")


@pytest.mark.slow
def test_every_interval_of_a_page_is_one_of_the_results():
    """A page may turn a difference round. The number of digits is that of the page."""
    known = set()
    for name in STUDIES:
        if not (reproduce.RESULTS / f"{name}.jsonl").exists():
            continue
        groups = claims.judged(name, reproduce.RESULTS).groups
        losses = {group: of.losses for group, of in groups.items() if group != WORSE and len(of.losses) > 1}
        pairs = list(itertools.permutations(losses, 2))
        bounds = [effect.interval() for effect in effects.effects(losses, pairs)]
        known |= {tuple(f"{bound + 0.0:+.{digits}f}" for bound in each) for each in bounds for digits in (3, 4)}
    signed = lambda text: text.replace("−", "-") if text[0] in "+−" else f"+{text}"
    texts = [*(config_files.ROOT / "docs").rglob("*.md"), config_files.ROOT / "README.md"]
    found = [
        (path.name, tuple(map(signed, match.groups())))
        for path in texts
        if "_build" not in path.parts and path.name != "reproduction.md"
        for match in INTERVAL.finditer(path.read_text())
    ]
    assert len(found) > 20
    assert [each for each in found if each[1] not in known] == []
