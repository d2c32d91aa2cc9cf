"""Constants of gpt-oss's activation (gpt-oss model card, section 2.3), which all kernels of this activation share."""

SLOPE, LIMIT = 1.702, 7.0
