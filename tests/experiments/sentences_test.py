"""The sentences that are written by hand in REPRODUCTION.md say what the verdicts say, and not more."""

import functools
import re
from typing import NamedTuple

import pytest

from experiments import claims, config_files, reproduce
from experiments.report.effects import HOLDS, KINDS, NO_DIFFERENCE, OPEN, kind
from experiments.studies import STUDIES

PAGE = config_files.ROOT / "experiments" / "REPRODUCTION.md"
WORSE = "worse"
BETTER, AS_GOOD = "better than", "as good as"
LOSS, VALIDATION = "verdict", "by_validation"


class Verdicts(NamedTuple):
    """The kinds of the verdicts on the claims whose study and arms match."""

    study: str
    first: str
    claim: str
    second: str
    by: str = LOSS

    def kinds(self):
        return [
            kind(getattr(judgement, self.by))
            for name in _with_results()
            if re.fullmatch(self.study, name)
            for judgement in _judged(name).judgements
            if judgement.claim.kind == self.claim
            and re.fullmatch(self.first, judgement.claim.first)
            and re.fullmatch(self.second, judgement.claim.second)
            and kind(judgement.verdict)
        ]


def only(wanted):
    return lambda kinds: kinds and {*kinds} == {wanted}


def none(unwanted):
    return lambda kinds: kinds and unwanted not in kinds


def some(*wanted):
    return lambda kinds: {*kinds} >= {*wanted}


def most(wanted):
    return lambda kinds: kinds.count(wanted) > len(kinds) / 2


VIT, GPT, TUNED = "methods_vit_cpu", "methods_gpt_cpu", "finetuning_sst2_cpu"
VITS, ALL = ".*_vit_cpu|equal_flops.*", ".*"
SPARSE = "(?!dense|random).*"
NARROWER, SHORTER = "narrower dense.*", "shorter dense.*"
LONGER = "SR-STE 1:16, more steps, .*"  # with the λ that is better for it
SAYS = [
    ("In the GPT, S-STE is better than STE.", only(HOLDS), Verdicts(GPT, "S-STE", BETTER, "STE")),
    ("In the ViT there is no difference that matters, and", only(NO_DIFFERENCE), Verdicts(VIT, "S-STE", BETTER, "STE")),
    ("and in fine-tuning S-STE is worse.", only(WORSE), Verdicts(TUNED, "S-STE .*", BETTER, "STE .*")),
    (
        "At 1:16 and with the same FLOPs, MdGf is not shown to be better than SR-STE in the ViT.",
        none(HOLDS),
        Verdicts("equal_flops.*", "MdGf 1:16.*", BETTER, LONGER),
    ),
    (
        "In the GPT, MdGf has more FLOPs, and is better or worse, depending on its gradient.",
        some(HOLDS, WORSE),
        Verdicts(GPT, "MdGf 1:16.*", BETTER, "SR-STE 1:16"),
    ),
    (
        "It is undecided whether MVUE is better than keeping the largest gradients.",
        only(OPEN),
        Verdicts(ALL, "MVUE.*", BETTER, "largest.*|least-squares g.*"),
    ),
    (
        "At 2:4, STE, SR-STE, S-STE and MdGf are as good as dense training in the ViT.",
        only(HOLDS),
        Verdicts(VIT, "STE|SR-STE|S-STE|MdGf .*", AS_GOOD, "dense"),
    ),
    ("By the validation loss, STE is undecided.", only(OPEN), Verdicts(VIT, "STE", AS_GOOD, "dense", VALIDATION)),
    (
        "A random choice of weights that never changes is as good, too.",
        only(HOLDS),
        Verdicts(VIT, "random 2:4 mask", AS_GOOD, "dense"),
    ),
    (
        "In the GPT, most methods are worse than dense training.",
        most(WORSE),
        Verdicts(GPT, SPARSE, AS_GOOD, "dense"),
    ),
    ("By the validation loss, all of them are.", only(WORSE), Verdicts(GPT, SPARSE, AS_GOOD, "dense", VALIDATION)),
    ("In fine-tuning on SST-2, all methods are worse.", only(WORSE), Verdicts(TUNED, SPARSE, AS_GOOD, "dense")),
    (
        "No sparse method is shown to be better than a narrower dense network.",
        none(HOLDS),
        Verdicts(ALL, SPARSE, BETTER, NARROWER),
    ),
    (
        "Some methods are better than a shorter dense run in the ViT, and some are worse.",
        some(HOLDS, WORSE),
        Verdicts(VITS, SPARSE, BETTER, SHORTER),
    ),
    (
        "In the GPT and in fine-tuning, none is shown to be better.",
        none(HOLDS),
        Verdicts(f"{GPT}|{TUNED}", SPARSE, BETTER, SHORTER),
    ),
    (
        "By the validation loss, STE is worse than a random 2:4 mask in the ViT and in the GPT,",
        only(WORSE),
        Verdicts(f"{VIT}|{GPT}", "STE", BETTER, "random 2:4 mask", VALIDATION),
    ),
    (
        "and it is undecided in the ViT whether STE is as good as dense training.",
        only(OPEN),
        Verdicts(VIT, "STE", AS_GOOD, "dense", VALIDATION),
    ),
    (
        "In the GPT, MdGf (30 %) + MVUE(dw) is worse than dense training, a narrower network and a shorter run.",
        only(WORSE),
        Verdicts(GPT, r"MdGf \(30 %\) \+ MVUE\(dw\)", AS_GOOD, "dense"),
    ),
    (
        "In the GPT, MdGf (30 %) + MVUE(dw) is worse than dense training, a narrower network and a shorter run.",
        only(WORSE),
        Verdicts(GPT, r"MdGf \(30 %\) \+ MVUE\(dw\)", BETTER, f"{NARROWER}|{SHORTER}"),
    ),
    (
        "In fine-tuning it is worse than dense training.",
        only(WORSE),
        Verdicts(TUNED, r"MdGf \(30 %\) \+ MVUE\(dw\).*", AS_GOOD, "dense"),
    ),
    (
        "In the ViT, MdGf at 1:16 is worse than a dense network with narrower feed-forward layers, and than a shorter "
        "dense run.",
        only(WORSE),
        Verdicts("equal_flops.*", "MdGf 1:16", BETTER, f"{NARROWER}|{SHORTER}"),
    ),
    (
        "In the ViT, FST and pruned activations are worse than dense training by the test loss.",
        only(WORSE),
        Verdicts(VITS, "FST|least-squares activations", AS_GOOD, "dense"),
    ),
    (
        "Whole rows in dw, at 1:4 and chosen by g, are worse than a narrower network.",
        only(WORSE),
        Verdicts(VITS, "rows by g 1:4", BETTER, NARROWER),
    ),
]


@pytest.mark.parametrize(("sentence", "holds", "of"), SAYS, ids=[sentence[:40] for sentence, *_ in SAYS])
def test_a_sentence_says_what_the_verdicts_say(sentence, holds, of):
    assert sentence in text()
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
    assert "most sparse methods take about as much time as dense training, or more" in " ".join(
        PAGE.read_text().split()
    )
    shares = [
        share
        for name in _with_results()
        for arm, share in claims.step_times(name, reproduce.RESULTS).items()
        if not arm.startswith(("dense", "narrower dense", "shorter dense"))
    ]
    assert len(shares) > 20
    assert sum(share > 0.95 for share in shares) > len(shares) / 2


@functools.cache
def text():
    return " ".join(PAGE.read_text().split())


@functools.cache
def _judged(name):
    return claims.judged(name, reproduce.RESULTS)


def _with_results():
    return [name for name in STUDIES if (reproduce.RESULTS / f"{name}.jsonl").exists()]
