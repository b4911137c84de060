"""Scores of pictures that were not trained on."""
