"""python tools/benchmarks/peak.py: GFLOP/s of large float32 matrix products, an upper bound for a step's speed."""

import subprocess
import sys
import time

from lingvo_moe.core.errors import UserError


def measure(size: int = 2048, seconds: float = 2.0) -> float:
  """GFLOP/s of the fastest float32 product of two square matrices in TensorFlow, repeated for `seconds`."""
  import tensorflow as tf

  a, b = tf.random.uniform([size, size]), tf.random.uniform([size, size])
  best, end = float('inf'), time.perf_counter() + seconds
  while best == float('inf') or time.perf_counter() < end:
    begun = time.perf_counter()
    tf.matmul(a, b)[0, 0].numpy()  # waits for the product
    best = min(best, time.perf_counter() - begun)
  return 2e-9 * size**3 / best


def measure_apart() -> float:
  """Runs `measure` in a separate process, so that it does not add to the memory of this one."""
  done = subprocess.run([sys.executable, '-P', __file__], capture_output=True, text=True)
  if done.returncode:
    raise UserError(f'the peak of matrix products could not be measured: {done.stderr.strip().splitlines()[-1]}')
  return float(done.stdout)


if __name__ == '__main__':
  print(measure())
