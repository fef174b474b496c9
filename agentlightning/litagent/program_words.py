"""The words for a program that failed, or whose reward was not found: its own output, shortened, and what to do.

A program runs in a temporary folder that is gone when its message is read, and its traceback is mostly libraries'.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from agentlightning.arguments import as_number
from agentlightning.errors import ConfigError
from agentlightning.frames import is_library

LONGEST = 2000
"""Characters of a program's stderr that are shown: its end."""
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "([^"]+)", line \d+')
_RAISED = re.compile(r"[\w.]+(: .+)?$")
"""The last line of a traceback: an exception with its message, which may be shorter."""
_GRADERS_FOLDER = re.compile(r"[^\s'\"]*/agl-grader-\w+/")
_VARIABLE = re.compile(r"\b[A-Z][A-Z0-9]*_[A-Z0-9_]+\b")
_NO_FILE = re.compile(
    r"no such file or directory(?:, \w+)?:? '([^'\n]+)'|([^\s:']+): no such file or directory$", re.I | re.M
)
_NO_MODULE = re.compile(r"^ModuleNotFoundError: No module named '([^'.\n]+)", re.M)
_LACKS_ARGUMENTS = re.compile(
    r"\bargv\b|arguments? (are|is) required|missing (required )?argument|^usage: ", re.I | re.M
)
_SCRIPTS = re.compile(r"(python[\d.]*|node|nodejs|ruby|perl|bash|sh|Rscript|php|deno|bun|tsx|ts-node)$")
_SCRIPT_FILE = re.compile(r".+\.(py|js|mjs|cjs|ts|rb|pl|sh|R|php)$")


NOT_POSTED = (
    "The program posted no reward. With reward='http' (--reward http) it sends {\"reward\": number} to AGL_REWARD_URL, "
    "with the key in OPENAI_API_KEY. To print the reward in the last line, leave that setting out."
)


def printed_too(stdout: str, reward: str) -> str | None:
    """The words for a program that prints a number in its last line where another one counts; None for others."""
    lines = [line.strip() for line in stdout.splitlines() if line.strip()]
    if not lines or _number(lines[-1]) is None:
        return None
    counts = {"http": "what it posts to AGL_REWARD_URL", "file": "what it writes to AGL_REWARD_FILE"}[reward]
    return (
        f"The program's last line is {lines[-1][:80]!r}, which does not count: with reward={reward!r} (--reward "
        f"{reward}) only {counts} does."
    )


def ended_badly(code: int, stdout: str, stderr: str, *, reward: str, folder: Path, files: Path | None) -> str:
    """The message of a program that ended with another exit code than 0."""
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    raised = stderr.rstrip().rpartition("\n")[2] if _TRACEBACK in stderr else ""
    first = f"The program ended with {how}. {raised if _RAISED.match(raised) else ''}".rstrip()
    text, advice = shown(stderr, folder, files), _advice(stdout, stderr, reward)
    words = [first, *advice, text] if raised else [first, text, *advice]  # above a traceback, as other hints stand
    return "\n".join(filter(None, words))


def shown(stderr: str, folder: Path, files: Path | None = None) -> str:
    """The end of what a program wrote to stderr, with the user's own paths and without the frames of libraries."""
    text = _own_frames(stderr.rstrip()).replace(f"{folder}/", f"{files}/" if files else "./")
    text = _GRADERS_FOLDER.sub("./", text)
    if len(text) <= LONGEST:
        return text
    return f"…\n{text[-LONGEST:].partition(chr(10))[2] or text[-LONGEST:]}"


def _own_frames(text: str) -> str:
    """The last traceback of Python's in it without the frames of libraries; other text is left as it is."""
    before, found, last = text.rpartition(_TRACEBACK)
    if not found:
        return text
    before = before.split(_TRACEBACK)[0]
    kept: list[str] = []
    dropping = False
    for line in last.splitlines()[1:]:
        frame = _FRAME.match(line)
        dropping = is_library(frame[1]) if frame else dropping and line.startswith("    ")
        if not dropping:
            kept.append(line)
    return "\n".join([before.rstrip(), found, *kept]).lstrip("\n")


def missed(stderr: str, seen: Collection[str], command: Sequence[str], setting: str = "env") -> Sequence[str]:
    """What to do about a variable or a file that the command finds when it is started by hand, and not here."""
    lacked = sorted({*_VARIABLE.findall(stderr)} - {*seen})
    hidden = [name for name in lacked if name in os.environ or f"KeyError: '{name}'" in stderr]
    words = [
        f"{name} is not among its variables: yours may hold secrets, and stay out. Give it with {setting}="
        f"{{'{name}': …}}, or in the command:  env {name}=… {Path(command[0]).name} …"
        for name in hidden[:1]
    ]
    if (lacks := _NO_MODULE.search(stderr)) and _SCRIPTS.match(Path(command[0]).name):
        words.append(
            f"The Python that runs it has no package {lacks[1]!r}: install it there, or give another Python by its "
            f"path, such as {sys.executable}."
        )
    folders = [Path.cwd(), *(Path(word).parent for word in command if os.path.isabs(word))]
    for path in (found[1] or found[2] for found in _NO_FILE.finditer(stderr)):
        place = next((f for f in folders if not os.path.isabs(path) and (f / path).exists()), None)
        if place is not None:
            words.append(
                f"{path!r} is in {place}, and the command runs in a folder of its own: have a folder copied there, "
                "--files FOLDER (files=…), or open an absolute path."
            )
            break
    return words


def check_grader(grader: object) -> None:
    """Raises ConfigError for a function that is given as a command, or that cannot be called with a run alone."""
    if isinstance(grader, str) and (named := re.fullmatch(r"\S+\.py:(\w+)", grader)):
        raise ConfigError(
            f"The grader {grader!r} names a function, and a command that prints the reward is wanted here, such as "
            f"'python {grader.rpartition(':')[0]}'. In a script the function itself is one: grader={named[1]}."
        )
    if not callable(grader):
        return
    try:
        signature = inspect.signature(grader)
    except ValueError:  # of what is built in there may be none
        return
    try:
        signature.bind(None)
    except TypeError:
        name = getattr(grader, "__name__", type(grader).__name__)
        raise ConfigError(
            f"The grader {name}{signature} is called with the finished run alone: def {name.strip('<>')}(run), "
            "with run.task, run.stdout and run.workspace (agl.ProgramRun)."
        ) from None


def _advice(stdout: str, stderr: str, reward: str) -> Sequence[str]:
    if "AGL_REWARD_URL" in stderr and "403" in stderr and reward != "http":
        return ["AGL_REWARD_URL takes rewards only with  --reward http,  or  reward='http'."]
    if _LACKS_ARGUMENTS.search(stderr):
        return [
            "The task is on its stdin, as JSON; its parts may stand in the command:  'python a.py {task.question}'."
        ]
    lines = [line.strip() for line in stdout.splitlines() if line.strip()]
    if reward == "last_line" and lines and (value := _number(lines[-1])) is not None:
        return [f"Its last line holds a reward, {value:g}, which does not count: a program must end with exit code 0."]
    return []


def without_reward(stdout: str, stderr: str) -> str:
    """What to say where the last line of stdout holds no reward: where it is instead, if it is anywhere."""
    lines = [line.strip() for line in stdout.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    words = f"The last line holds no reward: {last[:200]!r}."
    errors = [line.strip() for line in stderr.splitlines() if line.strip()]
    if errors and _number(errors[-1]) is not None:
        return f"{words} The last line of stderr is {errors[-1]!r}: print the reward to stdout."
    earlier = [(n, line) for n, line in enumerate(lines[:-1], start=1) if _number(line) is not None]
    if earlier:
        number, line = earlier[-1]
        return f"{words} Line {number} of {len(lines)} is {line!r}: print the reward last."
    if written := as_number(last):
        return f"{words}{written}"
    if last in ("True", "False", "true", "false"):
        return f"{words} Print a number: 1 or 0, such as print(int(right))."
    if last.startswith("{"):
        return f'{words} Its key is "reward": {{"reward": number}}, as json.dumps writes it.'
    if (value := re.search(r"[-+]?\d+(\.\d+)?\s*$", last)) is not None:
        return f'{words} Print the number alone, {value[0].strip()}, or {{"reward": number}}.'
    return f'{words} Print a number or {{"reward": number}}, or give a grader.'


def _number(line: str) -> float | None:
    """The reward that a line is; None for any other line."""
    try:
        found: Any = json.loads(line)
        found = found["reward"] if isinstance(found, dict) else found
        return None if isinstance(found, bool) else float(found)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def missing_script(command: Sequence[str]) -> str | None:
    """The script that an interpreter is given and that is not there; None where nothing is missing.

    Only a relative path with the ending of a script is looked for: others may be options, or files of an image.
    """
    if len(command) < 2 or not _SCRIPTS.match(command[0].rpartition("/")[2]):
        return None
    script = next((argument for argument in command[1:] if not argument.startswith("-")), "")
    before = command[1:][: command[1:].index(script)] if script else ()
    if {"-m", "-c", "-e"} & {*before} or not _SCRIPT_FILE.match(script) or Path(script).is_absolute() or "{" in script:
        return None
    return None if Path(script).exists() else script
