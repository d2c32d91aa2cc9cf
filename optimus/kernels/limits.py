"""Constants of gpt-oss's activation (its model card, section 2.3), for all of its kernels."""

SLOPE, LIMIT = 1.702, 7.0
