"""`python -m optimus.cli` is `optimus`."""

from optimus.cli.program import main

main()
