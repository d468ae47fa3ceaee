"""Features of the processor, as its operating system lists them."""

from __future__ import annotations

import functools

# Matrix products in bfloat16 with float32 accumulation: AVX-512 and AMX of x86, BF16 of Arm. With one of them
# TensorFlow's products (oneDNN) take a half to a third of the time of float32; without, they are emulated.
BFLOAT16_UNITS = ('avx512_bf16', 'amx_bf16', 'bf16')


@functools.cache
def has_bfloat16(path: str = '/proc/cpuinfo') -> bool:
  """Whether the processor has units for bfloat16; False where that is not known."""
  try:
    with open(path, encoding='utf-8', errors='replace') as f:
      lists = [line.partition(':')[2].split() for line in f if line.startswith(('flags', 'Features'))]
  except OSError:
    return False
  return any(unit in flags for flags in lists[:1] for unit in BFLOAT16_UNITS)
