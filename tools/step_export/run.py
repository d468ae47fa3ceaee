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
  shardings_of = shardings(spec, devices)
  state = initial_state(spec, shardings_of['state'])
  with np.load(FOLDER / 'batch.npz') as arrays:
    batch = {name: jax.device_put(arrays[name], sharding) for name, sharding in shardings_of['batch'].items()}

  begun = time.perf_counter()
  step = compiled(state, batch, shardings_of['state'])
  # By formula: XLA's own analysis counts the body of a loop once, and on a GPU no calls of libraries.
  flops = spec['flops'] and spec['flops'] / len(devices)
  made = f': {flops:.4g} FLOPs a step and device' if flops else ''
  print(f'compiled in {time.perf_counter() - begun:.1f} s{made}')

  seconds = []
  for number in range(1, steps + 1):
    begun = time.perf_counter()
    state, metrics = step(state, batch)
    metrics = {name: float(value) for name, value in jax.device_get(metrics).items()}
    seconds.append(time.perf_counter() - begun)
    tokens = sum(metrics[name] for name in spec['tokens'])
    print(f'step {number}: loss {metrics["loss"]:.8g}, {tokens / seconds[-1]:.1f} tokens/s', flush=True)
  usual = statistics.median(seconds)
  rate = f', {flops / usual / 1e12:.4g} TFLOP/s a device' if flops else ''
  print(f'median: {tokens / usual:.1f} tokens/s{rate}')


def find_devices(axes: list) -> np.ndarray:
  """Devices in the order of the mesh; on a CPU, as many virtual ones as the mesh needs."""
  sizes = [size for _, size in axes]
  count = int(np.prod(sizes))
  jax.config.update('jax_num_cpu_devices', count)
  found = jax.devices()
  if len(found) < count:
    sys.exit(f'this step is for {count} devices, and JAX finds {len(found)} ({found[0].platform}): export another')
  return mesh_utils.create_device_mesh(sizes, found[:count]).flatten()


def shardings(spec: dict, devices: np.ndarray) -> dict:
  """Shardings of the state and of a batch, nested as they are."""
  of = lambda part: jax.tree.map(lambda x: sharding(x, devices), part, is_leaf=lambda x: 'split' in x)
  return {part: of(spec[part]) for part in ('state', 'batch')}


def initial_state(spec: dict, shardings_of_state: dict) -> dict:
  """State before the first step; each device computes its own part."""
  keys = {part: {name: np.asarray(key, np.uint32) for name, key in of.items()} for part, of in spec['keys'].items()}
  options = {'in_shardings': shardings_of_state['step'], 'out_shardings': shardings_of_state}
  return jax.jit(load('init').call, **options)(keys)


def compiled(state: dict, batch: dict, shardings_of_state: dict) -> jax.stages.Compiled:
  """The step (state, batch) -> (state, metrics) for the devices of its arguments; it takes the memory of the state."""
  step = jax.jit(load('step').call, donate_argnums=0, out_shardings=(shardings_of_state, None))
  return step.lower(state, batch).compile()


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
