"""One operation per file: the plain reference beside the path that runs, one signature for both."""
