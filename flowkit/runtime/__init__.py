"""What a run stands on: addressed randomness, files, checkpoints, processes, devices, logs."""
