"""CPU backend: TensorFlow's own kernels on few cores. Runtimes create it; layers never import it."""

import functools

from lingvo_moe.ops import softmax_attention, vjp
from lingvo_moe.ops.backend import Backend
from lingvo_moe.ops.cpu import cross_entropy, factored, grouped_ffn, kernels, linear, sub_batches, threads

# Matrix products in bfloat16 with float32 accumulation: AVX-512 and AMX of x86, BF16 of Arm. With one of them
# TensorFlow's products (oneDNN) take a half to a third of the time of float32; without, they are emulated.
BFLOAT16_UNITS = ('avx512_bf16', 'amx_bf16', 'bf16')

OVERRIDES = {
  **vjp.OVERRIDES,
  'add_gradients': factored.add_gradients,
  'attention': sub_batches.by_rows(softmax_attention.attention, places=range(6)),
  'grouped_ffn': grouped_ffn.grouped_ffn,
  'heads_first': sub_batches.by_rows(softmax_attention.heads_first),
  'layer_norm': sub_batches.by_rows(vjp.layer_norm),
  'linear': sub_batches.by_rows(linear.trained_linear),
  'map_rows': sub_batches.map_rows,
  'mean_square': kernels.mean_square,
  'product': linear.trained_product,
  'queue_positions': kernels.queue_positions,
  'relu': kernels.trained_relu,
  'softmax_cross_entropy': sub_batches.by_rows(cross_entropy.softmax_cross_entropy, places=(0, 1)),
  'write_cache': kernels.write_cache,
}


# Operations whose gradients are not taken.
_FORWARD = {
  'grouped_ffn': grouped_ffn.grouped_ffn_forward,
  'linear': linear.linear,
  'product': linear.product,
  'relu': kernels.relu,
}


@functools.cache
def has_bfloat16(path: str = '/proc/cpuinfo') -> bool:
  """Whether the processor has units for bfloat16; False where that is not known."""
  try:
    with open(path, encoding='utf-8', errors='replace') as f:
      lists = [line.partition(':')[2].split() for line in f if line.startswith(('flags', 'Features'))]
  except OSError:
    return False
  return any(unit in flags for flags in lists[:1] for unit in BFLOAT16_UNITS)


def backend(*, training: bool) -> Backend:
  """CPU backend under the present thread policy; `training` says whether gradients of its functions are taken."""
  parallel = threads.parallel_kernels()
  forward_only = {} if training else _FORWARD
  return Backend(
    'cpu',
    {**OVERRIDES, **forward_only},
    dispatcher='grouped',
    sub_batches=min(parallel, threads.MAX_SUB_BATCHES),
    parallel_calls=parallel,
    updates_in_place=training,
    bfloat16=has_bfloat16(),
  )


def saved() -> Backend:
  """CPU backend for functions that are saved and run elsewhere, which compute in the types of this processor.

  Its overrides only need TensorFlow's kernels and have no gradients of their own, which a SavedModel does not hold. It
  has no sub-batches: threads are for the process that loads the function to set.
  """
  names = 'grouped_ffn', 'linear', 'queue_positions', 'write_cache'
  overrides = {name: {**OVERRIDES, **_FORWARD}[name] for name in names}
  return Backend('cpu_saved', overrides, dispatcher='grouped', bfloat16=has_bfloat16())


# Updates of large weights, compiled by XLA for CPUs; see optim/cpu/in_place.py.
COMPILED = Backend('cpu_xla', {'mean_square': kernels.compiled_mean_square})
