"""How the modules of a model are composed for a mesh: read `build.py` first."""
