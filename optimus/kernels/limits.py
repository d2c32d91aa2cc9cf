"""Constants of gpt-oss's SwiGLU (gpt-oss model card, section 2): the sigmoid's slope and the clamping limit."""

SLOPE, LIMIT = 1.702, 7.0
