"""The eight needle tasks of RULER: generation of the prompts and string-match scoring."""

from .generator import NeedleGenerator, Record
from .scoring import score_all
from .tasks import TASKS, NeedleTask

__all__ = ["TASKS", "NeedleGenerator", "NeedleTask", "Record", "score_all"]
