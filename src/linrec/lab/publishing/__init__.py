"""Runs for others: folders for the Hugging Face hub with a model card, and scores on the tasks of lm-eval."""
