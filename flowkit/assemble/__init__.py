"""Configs and flags become models, rewards, prompts and trainers: the only package that knows them all."""
