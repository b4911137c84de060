"""Prompts: read strictly, picked by address."""
