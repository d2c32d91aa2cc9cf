"""The sigmoid's slope and the clamping limit of gpt-oss's SwiGLU (gpt-oss model card, section 2)."""

SLOPE, LIMIT = 1.702, 7.0
