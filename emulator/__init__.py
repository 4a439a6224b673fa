"""A functional emulator of PTX for Hopper and Blackwell on numpy arrays: see README.md and `run.run`."""
