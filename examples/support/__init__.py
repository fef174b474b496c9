"""A support agent on tau2: its tasks, its simulated user, and what it earns."""

import os
from contextlib import suppress

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else importing litellm asks the internet for prices
with suppress(ImportError):  # what makes tasks and demonstrations does without tau2
    from loguru import logger

    logger.disable("tau2")  # it writes lines to the screen for every message
