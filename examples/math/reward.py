"""What an answer is worth."""

import math
import re


def score(text: str, answer: float) -> float:
    """1.0 if the last number in the text is the answer, to four decimals or one part in 100,000; else 0.0."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    right = bool(numbers) and math.isclose(float(numbers[-1]), answer, rel_tol=1e-5, abs_tol=1e-4)
    return 1.0 if right else 0.0
