"""What the kernels share."""

import torch
import triton
import triton.language as tl

#: do the kernels run in Triton's interpreter, on the CPU?
INTERPRETED = bool(triton.knobs.runtime.interpret)

#: numbers of a parameter that one program looks at, and how many of them at a time
CHUNK, BLOCK = 2048 if INTERPRETED else 4096, 1024

#: the same where each comes with all products of its groups: a number a thread, and the interpreter has one
LANES = 1024 if INTERPRETED else 128

#: what parameters and gradients may be of
KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def located(chunks, i, CHUNK: tl.constexpr):
    """Which parameter, and from where to where."""
    return tl.load(chunks + 3 * i), tl.load(chunks + 3 * i + 1) * CHUNK, tl.load(chunks + 3 * i + 2)


@triton.jit
def pointer(addresses, which, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    found = tl.load(addresses + which).to(tl.pointer_type(KIND))
    if ALIGNED:
        found = tl.multiple_of(found, 16)
    return found
