"""Python reads this as it starts where PYTHONPATH names its folder: ranks on CPUs then have the silent backend."""

from helpers.silent_backend import be_that_of_cpus

be_that_of_cpus()
