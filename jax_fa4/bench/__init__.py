"""`python -m jax_fa4 bench`: jax_fa4 beside whatever other implementations of attention are installed.

`cells` says what is computed, `peers` by whom, `clock` how long it took, `run` puts these together, and `report` makes
a table, a JSON file and a plot of the result.
"""
