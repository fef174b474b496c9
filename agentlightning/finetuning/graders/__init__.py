"""The graders of OpenAI's fine-tuning API: what gives an output its reward.

grader = parse_grader({"type": "string_check", "name": "exact", "operation": "eq",
                       "input": "{{ sample.output_text }}", "reference": "{{ item.answer }}"})
(await grade(grader, {"answer": "4"}, Sample.of_text("4"))).reward  # 1.0
"""

from agentlightning.errors import GraderRefused
from agentlightning.finetuning.graders.base import Grader
from agentlightning.finetuning.graders.model import HttpModels
from agentlightning.finetuning.graders.parse import grade, parse_grader, run_grader, validate_grader
from agentlightning.finetuning.graders.result import Errors, Grade, Models, Sample
from agentlightning.finetuning.graders.settings import GraderSettings, read_settings

__all__ = [
    "Errors",
    "Grade",
    "Grader",
    "GraderRefused",
    "GraderSettings",
    "HttpModels",
    "Models",
    "Sample",
    "grade",
    "parse_grader",
    "read_settings",
    "run_grader",
    "validate_grader",
]
