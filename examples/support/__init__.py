"""A support agent on tau2: its tasks, its simulated user, and what it earns."""

import os
from contextlib import suppress
from importlib import import_module

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else importing litellm asks the internet for prices
with suppress(ImportError):  # what makes tasks and demonstrations does without tau2
    import_module("loguru").logger.disable("tau2")  # it writes lines to the screen for every message
