"""Triton kernels. The experts' kernels implement Algorithm 1 of the Optimus paper (FastSparseMoE):

    stage 2  token counting     token_count.py
    stage 3  index generation   token_index.py
    stage 4  expert computation expert_up.py, expert_down.py
    stage 5  output reduction   expert_reduce.py

Rules for kernels:

- Sums have a fixed order: no two programs add to one element.
- The host does not wait for the device.
- The compiler must not specialise on numbers that change from batch to batch.
- The number of tokens may be 0.

Triton's interpreter gives wrong results for bf16.
"""
