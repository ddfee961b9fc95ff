"""Sentences on results that are written by hand say what the verdicts say, and not more."""

import functools

import pytest

from experiments import claims, config_files, reproduce
from experiments.report.effects import HOLDS, KINDS, NO_DIFFERENCE, OPEN
from tests.experiments import sentences_of_papers, sentences_of_reproduction, sentences_of_which_method
from tests.experiments.verdicts import WORSE, most, none, only, some, with_results

PAGES = {
    "experiments/REPRODUCTION.md": sentences_of_reproduction,
    "docs/tutorials/which_method.md": sentences_of_which_method,
    "docs/explained/papers.md": sentences_of_papers,
}
SAYS = [(page, *row) for page, module in PAGES.items() for row in module.SENTENCES]


@functools.cache
def text(page):
    return " ".join((config_files.ROOT / page).read_text().split())


@pytest.mark.parametrize(("page", "sentence", "holds", "of"), SAYS, ids=[sentence[:40] for _, sentence, *_ in SAYS])
def test_a_sentence_says_what_the_verdicts_say(page, sentence, holds, of):
    assert sentence in text(page)
    assert holds(of.kinds()), of.kinds()


def test_each_condition_can_fail():
    assert not only(HOLDS)([])
    assert not only(HOLDS)([HOLDS, OPEN])
    assert not only(HOLDS)([""])
    assert not none(HOLDS)([])
    assert not none(HOLDS)([OPEN, HOLDS])
    assert not some(HOLDS, WORSE)([HOLDS, OPEN])
    assert not most(WORSE)([WORSE, OPEN])
    assert {HOLDS, WORSE, NO_DIFFERENCE, OPEN} == {*KINDS}


def test_most_methods_take_about_as_much_time_as_dense_training_or_more():
    assert "most sparse methods take about as much time as dense training, or more" in text(
        "experiments/REPRODUCTION.md"
    )
    shares = [
        share
        for name in with_results()
        for arm, share in claims.step_times(name, reproduce.RESULTS).items()
        if not arm.startswith(("dense", "narrower dense", "shorter dense"))
    ]
    assert len(shares) > 20
    assert sum(share > 0.95 for share in shares) > len(shares) / 2
