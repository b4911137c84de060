"""The smallest config that loads."""

SMALL = """\
algorithm: grpo
model: builtin:tiny-flux
steps: 3
out: runs/x
size: 96x32
prompts: {train: a.txt, test: b.txt}
rollout:
  groups: 2
  samples: 4
  steps: 6
reward: {ocr: 1.0}
optim: {lr: 1e-4, micro: 4}
"""
