"""The doctor: says what is wrong with a run or an agent, why, and what to try first. It reads; it changes nothing.

diagnosis = await why(store, run_id)      # a finished run, or one that goes on
diagnosis.verdict, diagnosis.findings
"""

from agentlightning.doctor.agent import Plan, examine
from agentlightning.doctor.breaks import Break, break_findings, find_breaks, lost_by_cause
from agentlightning.doctor.evidence import Evidence, gather
from agentlightning.doctor.why import diagnose, find_run, why
from agentlightning.types.finding import Diagnosis, Finding, Severity

__all__ = [
    "Break",
    "Diagnosis",
    "Evidence",
    "Finding",
    "Plan",
    "Severity",
    "break_findings",
    "diagnose",
    "examine",
    "find_breaks",
    "find_run",
    "gather",
    "lost_by_cause",
    "why",
]
