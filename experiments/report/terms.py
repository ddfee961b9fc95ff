"""Words of reports, each explained in the first part of a page that uses it. docs/glossary.md says the same."""

import html
import re

from experiments.report.words import safe

TERMS = {  # a word as it stands in reports: its meaning. docs/glossary.md has each meaning, word by word
    "hardened": "The weights that inference uses: pruned for good, by the final form of each pruner.",
    "effective": "The FLOPs that products would have if the zeros of n:m operands cost nothing. A count, not a time.",
    "share of dense": "The effective FLOPs of a run divided by its dense FLOPs.",
    "frontier": "The runs for which no other finished run has a better score at the same or fewer effective FLOPs.",
    "best": "The best evaluation of the run. Its checkpoint is kept.",
    "train": "Means over the training steps since the previous line, with the augmentation and the label smoothing of "
    "training.",
    "validation": "A split that no step trains on. It decides which checkpoint is the best.",
    "eval": "The scores of an evaluation, with the weights as they are in training: of the validation split, or of the "
    "test split if there is no validation split.",
    "gradient norm": "The root of the sum of squares over the gradients of all parameters.",
    "FLOP per second": "FLOPs of the dense model per second, even if zeros are skipped.",
    "MFU": "Model FLOPs utilisation: dense FLOPs per second, as a share of the peak of the devices.",
    "peak memory": "The most memory that was in use at one time, of a device or of the process, as the report says.",
    "temporary memory": "What a step needs on a device besides its arguments and its results, counted by XLA.",
    "slots": "The place of one operand in one product. It holds a pruner or is empty. In its name, fwd is the product "
    "for y, dlhs the product for dx, and drhs the product for dw.",
    "emulated": "XLA multiplies the pruned operands, zeros included.",
    "packed": "A kernel multiplies a packed operand, which is 2:4 or sparser, by a dense one on sparse tensor cores.",
    "mask": "An array of booleans: True where a value is kept.",
    "taken for": "A test example has one class, and the model predicts another: the first is taken for the second.",
    "confidence": "The probability that the model gives to its prediction.",
    "loss": "Mean cross-entropy in nats: per example for a classifier, per token for a language model.",
    "nats": "The unit of a loss with the natural logarithm. One nat is 1.44 bits.",
    "±": "The standard error of the number before it, over seeds.",
}  # fmt: skip


def visible(body: str) -> str:
    """Return the text of a piece of HTML, with the descriptions of its pictures."""
    labels = " ".join(re.findall(r'aria-label="([^"]*)"', body))
    return html.unescape(re.sub(r"<(style|details)\b.*?</\1>|<[^>]*>", " ", body, flags=re.DOTALL) + labels)


def explained(bodies: list[str]) -> list[str]:
    """Return parts of a page, each with the terms that it is the first to use."""
    left, parts = dict(TERMS), []
    for body in bodies:
        text = visible(body).lower()
        used = [term for term in left if re.search(rf"(?<!\w){re.escape(term.lower())}(?!\w)", text)]
        rows = "".join(f"<dt>{safe(term)}</dt><dd>{safe(left.pop(term))}</dd>" for term in used)
        summary = f"<summary>What these words mean: {safe(', '.join(used))}</summary>"
        parts.append(f'{body}<details class="terms">{summary}<dl>{rows}</dl></details>' if used and body else body)
    return parts
