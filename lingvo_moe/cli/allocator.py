"""Allocator of TensorFlow's CPU kernels, which TensorFlow chooses by the environment when it first needs memory.

By default that is the C library's malloc, unless oneDNN is in use. On some machines malloc takes the memory of large
tensors from the system and gives it back at every step, which is then half of the time (docs/results/speed.md).
TensorFlow's own allocator (BFC, best fit with coalescing) keeps what it has taken.
"""

import os

from lingvo_moe.core import host_memory

_USES_BFC = 'TF_CPU_ALLOCATOR_USE_BFC'
_LIMIT = 'TF_CPU_BFC_MEM_LIMIT_IN_MB'  # TensorFlow's default is 64 GiB, beyond which it fails


def keep_memory() -> None:
  """Selects BFC, up to the memory of the host, for this and child processes; variables that the user has set stay.

  Called before TensorFlow is imported.
  """
  os.environ.setdefault(_USES_BFC, '1')
  os.environ.setdefault(_LIMIT, str(max(host_memory.size() >> 20, 1)))
