"""String-match scoring."""

from __future__ import annotations

import re
from collections.abc import Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")


def score_all(prediction: str, references: Sequence[str]) -> float:
    """Share of the references that occur in the prediction, in percent.

    Case is ignored, control characters count as line breaks, and a reference inside a longer string counts.

    Args:
        prediction: Generated text.
        references: Expected strings, at least one.

    Returns:
        0.0 to 100.0.

    Raises:
        ValueError: If ``references`` is a bare string (it would be matched letter by letter) or empty.
    """
    if isinstance(references, str) or not references:
        raise ValueError(f"references must be a non-empty list of strings, got {references!r}")
    text = _CONTROL.sub("\n", prediction.strip()).strip().lower()
    return 100.0 * sum(reference.lower() in text for reference in references) / len(references)
