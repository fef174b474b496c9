"""Sentiment of film reviews with a real pretrained model: data, model and agent."""
