"""python -m lingvo_moe.bench.peak: GFLOP/s of large float32 matrix products, the most that a step could reach here."""

from __future__ import annotations

import subprocess
import sys
import time

from lingvo_moe.core.errors import UserError


def measure(size: int = 2048, seconds: float = 2.0) -> float:
  """GFLOP/s of the fastest of so many seconds' products of two square matrices, float32, in TensorFlow."""
  import tensorflow as tf

  a, b = tf.random.uniform([size, size]), tf.random.uniform([size, size])
  best, end = float('inf'), time.perf_counter() + seconds
  while best == float('inf') or time.perf_counter() < end:
    begun = time.perf_counter()
    tf.matmul(a, b)[0, 0].numpy()  # which is there when all is
    best = min(best, time.perf_counter() - begun)
  return 2e-9 * size**3 / best


def measure_apart() -> float:
  """`measure` in a process of its own, so that nothing of it is left in the memory of this one."""
  done = subprocess.run([sys.executable, '-m', 'lingvo_moe.bench.peak'], capture_output=True, text=True)
  if done.returncode:
    raise UserError(f'the peak of matrix products could not be measured: {done.stderr.strip().splitlines()[-1]}')
  return float(done.stdout)


if __name__ == '__main__':
  print(measure())
