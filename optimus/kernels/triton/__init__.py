"""Triton kernels. Most files have the kernels of one operation, or of a stage of the sparse block.

The sparse block is Algorithm 1 of the Optimus paper (FastSparseMoE), with these stages:

    stage 2  token counting     token_count.py
    stage 3  index generation   token_index.py
    stage 4  expert computation expert_up.py, expert_down.py
    stage 5  output reduction   expert_reduce.py

`expert_mlp.py` composes these stages into one autograd function. The dispatcher implements stage 1, token
communication.

Rules for all kernels:

- Sums have a fixed order and the same bits every time: no two programs add to one element.
- The host never waits for the device. The host may not know the number of routed rows, so grids and buffers have the
  size of an upper bound.
- Kernels compute in fp32, but matmuls read their operands in the stored dtype, and sums of squares may be float64.
- Triton's interpreter gives wrong results for bf16. Without an accelerator, the tests therefore check the kernels in
  fp32 and fp16.
- The compiler does not specialise kernels on numbers that change from batch to batch, so another number of tokens
  usually compiles nothing.
- The number of tokens may be 0: masks then exclude all elements, or the host launches no kernel.

Only this package imports triton. Callers import kernels only on devices that run Triton (see `kernels.backend`).
"""
