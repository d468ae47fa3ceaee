"""CPU backend: TensorFlow's own kernels on few cores. Runtimes create it; layers never import it."""

from __future__ import annotations

import functools

from lingvo_moe.ops import vjp
from lingvo_moe.ops.backend import Backend
from lingvo_moe.ops.cpu import cache, grouped_ffn, linear, mean_square, processor, queue, sub_batches, threads

OVERRIDES = {
  **vjp.OVERRIDES,
  'grouped_ffn': grouped_ffn.grouped_ffn,
  'linear': linear.linear,
  'map_rows': sub_batches.map_rows,
  'map_sub_batches': sub_batches.map_sub_batches,
  'mean_square': mean_square.mean_square,
  'product': linear.product,
  'queue_positions': queue.queue_positions,
  'softmax_cross_entropy': functools.partial(vjp.softmax_cross_entropy, sparse=True),
  'write_cache': cache.write_cache,
}


def backend(*, training: bool) -> Backend:
  """CPU backend under the present thread policy; `training` says whether gradients of its functions are taken."""
  parallel = threads.parallel_kernels()
  forward_only = {} if training else {'grouped_ffn': grouped_ffn.grouped_ffn_forward}
  return Backend(
    'cpu',
    {**OVERRIDES, **forward_only},
    dispatcher='grouped',
    sub_batches=min(parallel, threads.MAX_SUB_BATCHES),
    parallel_calls=parallel,
    updates_in_place=training,
    bfloat16=processor.has_bfloat16(),
  )


# For functions that are saved and run elsewhere: overrides that only need TensorFlow's kernels and have no gradients of
# their own, which a SavedModel does not hold. No sub-batches: threads are for the process that loads it to set.
SAVED = Backend(
  'cpu_saved',
  {
    'grouped_ffn': grouped_ffn.grouped_ffn_forward,
    'linear': linear.linear,
    'queue_positions': queue.queue_positions,
    'write_cache': cache.write_cache,
  },
  dispatcher='grouped',
)

# Updates of large weights, compiled by XLA for CPUs; see optim/cpu/in_place.py.
COMPILED = Backend('cpu_xla', {'mean_square': mean_square.compiled_mean_square})
