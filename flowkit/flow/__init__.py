"""The mathematics: pure functions of tensors and numbers, in the dtype they are given.

One convention throughout: time t is the noise level of rectified flow, 1 = noise, 0 = data,
x_t = (1 - t) x0 + t eps and v = eps - x0. Grids fall, so a step from t to s has dt = s - t < 0.
"""
