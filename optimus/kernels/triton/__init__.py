"""The Triton path of the operations: one file per operation, and one per stage of the sparse block.

The sparse block is Algorithm 1 of the Optimus paper (FastSparseMoE), whose stages are found by name:

    stage 2  token counting     token_count.py
    stage 3  index generation   token_index.py
    stage 4  expert computation expert_up.py, expert_down.py
    stage 5  output reduction   expert_reduce.py

`expert_mlp.py` composes them into one autograd function. (Stage 1, token communication, is the dispatcher's.)

What holds for all kernels:

- Sums are made in a fixed order: no atomics, the same bits every time.
- The host never waits for the device. How many rows are routed here is known on the device only, so grids and buffers have
  their upper bound, and programs without work end at once. A CUDA graph can hold all of it.
- Tiles are widened to fp32 after they are loaded, and sums are fp32. Triton's interpreter is wrong for bf16; it runs fp32
  and fp16, in which the tests check the kernels where there is no accelerator.
- Numbers that change from batch to batch are not specialised on, so that another length compiles nothing.
- Every grid has at least one program, so that no tokens at all is no special case; masks leave it nothing to do.

This package imports triton; nothing outside it does, and it is imported only where it runs (see `kernels.backend`).
"""
