"""The end of a prompt optimiser's run: the best prompt as files, and what it comes to in words."""

from __future__ import annotations

import json

from agentlightning.algorithm.prompts.candidate import difference
from agentlightning.algorithm.prompts.evaluation import pairs
from agentlightning.algorithm.prompts.run import PromptRun
from agentlightning.algorithm.prompts.settings import PromptSettings
from agentlightning.algorithm.prompts.significance import least_gain, threshold
from agentlightning.files import atomic_write
from agentlightning.types import Demonstrations
from agentlightning.types.finding import counted

BEST_FOLDER = "best"
MOST_REASONS = 3


def conclude(settings: PromptSettings, run: PromptRun) -> None:
    """Hand the result to the algorithm, write it down, and say what came of it."""
    settings.keep(run.candidates, run.incumbent.resources(run.templates))
    write_best(run)
    run.note(closing(run))


def write_best(run: PromptRun) -> None:
    """`best/NAME.txt` for each template (.jsonl for demonstrations), and `best/prompts.json` with all of them and where
    they came from.
    """
    folder = run.context.run_dir / BEST_FOLDER
    for name, text in run.incumbent.texts:
        kind = "jsonl" if isinstance(run.templates[name], Demonstrations) else "txt"
        atomic_write(folder / f"{name}.{kind}", text)
    whole = {
        "candidate": run.incumbent.key,
        "promoted": run.incumbent != run.seed,
        "templates": {name: r.model_dump(mode="json") for name, r in run.incumbent.resources(run.templates).items()},
        "diff": difference(run.seed, run.incumbent),
    }
    atomic_write(folder / "prompts.json", json.dumps(whole, indent=2, ensure_ascii=False) + "\n")


def closing(run: PromptRun) -> str:
    """What became better, by how much, what it cost, what was not enough, and where the result is."""
    lines = ["", *_outcome(run), f"Spent: {run.ledger.words()}."]
    if run.rejected:
        reasons = "; ".join(dict.fromkeys(run.rejected[:MOST_REASONS]))
        lines.append(f"{len(run.rejected)} edits were not run: {reasons}{'; …' * (len(run.rejected) > MOST_REASONS)}")
        if len(run.candidates) == 1:
            lines.append("So nothing was tried but the first prompt. Take a stronger model as the critic.")
    lines.append(f"The best prompt is in {run.context.run_dir / BEST_FOLDER}.")
    return "\n".join(lines)


def _outcome(run: PromptRun) -> list[str]:
    if run.incumbent == run.seed:
        lines = ["No candidate was shown to be better than the prompt that the run began with, which stays the best."]
        if run.closest is not None:
            candidate, verdict = run.closest
            lines.append(
                f"The closest was {candidate.key}: {verdict.why}. More validation tasks, or a higher significance, "
                f"could tell.\n{difference(run.seed, candidate)}"
            )
        return lines
    both = list(pairs(run.known(run.seed), run.known(run.incumbent)))
    before, after = [a for a, _ in both], [b for _, b in both]
    gain = (sum(after) - sum(before)) / len(both)
    rate, looked_at = run.settings.significance, len(run.candidates) - 1
    least = least_gain([b - a for a, b in both], threshold(rate, max(looked_at, 1)), run.settings.width)
    return [
        f"Validation reward {sum(before) / len(both):.3f} with the first prompt, {sum(after) / len(both):.3f} with the "
        f"best, on the same {counted(len(both), 'task')}: {gain:+.3f}, and {least:+.3f} or more "
        f"for sure but for {rate:.0%} of runs: the best of {counted(looked_at, 'candidate')} was also lucky.",
        difference(run.seed, run.incumbent),
    ]
