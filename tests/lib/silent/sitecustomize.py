"""Gives ranks on CPUs the silent backend: Python runs this module at its start if PYTHONPATH has its folder."""

from helpers.silent_backend import be_that_of_cpus

be_that_of_cpus()
