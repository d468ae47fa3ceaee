"""python run.py [STEPS]: runs the step that was exported to this folder, on the devices that JAX finds.

It needs only JAX and NumPy. The folder also holds the step, the program of initial values, a batch, and spec.json with
the sharding of every array. Every step takes the same batch.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

import jax
import numpy as np
from jax import export
from jax.experimental import mesh_utils
from jax.sharding import NamedSharding, PartitionSpec

FOLDER = pathlib.Path(__file__).resolve().parent


def main(steps: int) -> None:
  spec = json.loads((FOLDER / 'spec.json').read_text())
  devices = find_devices(spec['mesh'])
  kind, platform = devices[0].device_kind, devices[0].platform
  print(f'{spec["model"]}, {spec["program"]} step on {len(devices)} x {kind} ({platform})')
  is_array = lambda x: 'split' in x
  shardings = {
    part: jax.tree.map(lambda x: sharding(x, devices), spec[part], is_leaf=is_array) for part in ('state', 'batch')
  }

  keys = {part: {name: np.asarray(key, np.uint32) for name, key in of.items()} for part, of in spec['keys'].items()}
  everywhere = shardings['state']['step']
  init = jax.jit(load('init').call, in_shardings=everywhere, out_shardings=shardings['state'])
  state = init(keys)
  with np.load(FOLDER / 'batch.npz') as arrays:
    batch = {name: jax.device_put(arrays[name], sharding) for name, sharding in shardings['batch'].items()}

  begun = time.perf_counter()
  step = jax.jit(load('step').call, donate_argnums=0, out_shardings=(shardings['state'], None))
  step = step.lower(state, batch).compile()
  # FLOPs of one device; XLA counts the body of a loop once.
  flops = (step.cost_analysis() or {}).get('flops', float('nan'))
  print(f'compiled in {time.perf_counter() - begun:.1f} s: {flops:.4g} FLOPs a step and device')

  seconds = []
  for number in range(1, steps + 1):
    begun = time.perf_counter()
    state, metrics = step(state, batch)
    metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
    seconds.append(time.perf_counter() - begun)
    tokens = sum(metrics[name] for name in spec['tokens'])
    print(f'step {number}: loss {metrics["loss"]:.8g}, {tokens / seconds[-1]:.1f} tokens/s', flush=True)
  usual = statistics.median(seconds)
  print(f'median: {tokens / usual:.1f} tokens/s, {flops / usual / 1e12:.4g} TFLOP/s a device')


def find_devices(axes: list) -> np.ndarray:
  """Devices in the order of the mesh; on a CPU, as many virtual ones as the mesh needs."""
  sizes = [size for _, size in axes]
  count = int(np.prod(sizes))
  jax.config.update('jax_num_cpu_devices', count)
  found = jax.devices()
  if len(found) < count:
    sys.exit(f'this step is for {count} devices, and JAX finds {len(found)} ({found[0].platform}): export another')
  return mesh_utils.create_device_mesh(sizes, found[:count]).flatten()


def sharding(array: dict, devices: np.ndarray) -> NamedSharding:
  """Sharding of an array, from its description in spec.json."""
  names, sizes = zip(*array['mesh'], strict=True)
  split = PartitionSpec(*(tuple(axes) or None for axes in array['split']))
  return NamedSharding(jax.sharding.Mesh(devices.reshape(sizes), names), split)


def load(name: str) -> export.Exported:
  return export.deserialize(bytearray((FOLDER / f'{name}.stablehlo').read_bytes()))


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description='Runs the step that was exported to this folder.')
  parser.add_argument('steps', type=int, nargs='?', default=10)
  main(parser.parse_args().steps)
