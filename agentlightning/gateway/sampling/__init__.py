"""From a request to its answer: planning the prompt, sampling from the engine, settings."""
