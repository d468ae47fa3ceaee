"""Peak figures of TPU generations, for rooflines: FLOP/s, memory, bandwidths and links of a device.

A device is a device in JAX and in a mesh: one of the two cores of a chip of v2, v3, v4 and tpu7x, and a whole chip of
v5e, v5p and v6e. (Machines with v4 usually show two cores as one device; a topology here shows both.)

Sources: Google's documentation of each generation, docs.cloud.google.com/tpu/docs/ v2, v3, v4, v5e, v5p, v6e, tpu7x:
peak FLOP/s, HBM and its bandwidth, divided by the devices of a chip. A link's bandwidth is one way: the documented
bandwidth of all links of a chip both ways (v5e, v5p, v6e, tpu7x), or the AllReduce bandwidth of a pod divided by its
links, which for v2 and v3 are the 496 and 656 Gbit/s of Jouppi et al., 'A domain-specific supercomputer for training
deep neural networks' (CACM 63(7), 2020), and for v4 45 GB/s. The usable part of the HBM is the limit that the compiler
reports for a program that does not fit (libtpu 0.0.42).
"""

import dataclasses
import math
from typing import Self

from lingvo_moe.core.errors import UserError, closest, shown

HOP_SECONDS = 1e-6  # latency from a chip to the next; about the value that 'How to Scale Your Model' (2025) measures


@dataclasses.dataclass(frozen=True)
class Chip:
  """TPU generation: peak figures of a device and of the links between chips."""

  name: str  # as in a topology, 'v3:32x32'
  devices: int  # per chip
  flops: float  # peak FLOP/s of a device in bfloat16, in which TPUs by default multiply float32 matrices too
  # Hz: that peak over the 128 x 128 multipliers and adders of each matrix unit; None for units of another size.
  clock: float | None
  hbm: float  # GiB of memory of a device
  usable: float  # GiB of it that the compiler allows a program
  hbm_bandwidth: float  # bytes/s of a device
  link_bandwidth: float  # bytes/s of a link between two chips, each way
  dims: int  # number of axes of the torus; a chip has two links along each
  wraps: int  # least number of chips along an axis of a slice at which its two ends are linked


_CHIPS = (
  Chip('v2', 2, 45e12 / 2, 0.70e9, 8, 7.48, 700e9 / 2, 62e9, 2, 16),
  Chip('v3', 2, 123e12 / 2, 0.94e9, 16, 15.48, 900e9 / 2, 82e9, 2, 32),
  Chip('v4', 2, 275e12 / 2, 1.05e9, 16, 15.25, 1200e9 / 2, 45e9, 3, 4),
  Chip('v5e', 1, 197e12, 1.5e9, 16, 15.75, 819e9, 50e9, 2, 16),
  Chip('v5p', 1, 459e12, 1.75e9, 96, 95.74, 2765e9, 100e9, 3, 4),
  Chip('v6e', 1, 918e12, None, 32, 31.25, 1638e9, 100e9, 2, 16),
  Chip('tpu7x', 2, 2307e12 / 2, None, 96, 94.75, 7380e9 / 2, 100e9, 3, 4),
)
CHIPS = {chip.name: chip for chip in _CHIPS}


@dataclasses.dataclass(frozen=True)
class Topology:
  """TPU slice, a grid of chips of one generation: 'v3:32x32' is 1024 chips, 2048 cores."""

  chip: Chip
  shape: tuple[int, ...]

  @classmethod
  def parse(cls, text: str) -> Self:
    """Parses a topology such as 'v5p:4x4x4'; UserError for an unknown generation, or no grid of its chips."""
    name, _, sizes = text.partition(':')
    if name not in CHIPS:
      raise UserError(f'there is no TPU {shown(name)}; {closest(name, CHIPS)}')
    chip, shape = CHIPS[name], sizes.split('x')
    if not all(n.isdecimal() and len(n) < 6 and int(n) > 0 for n in shape) or len(shape) > chip.dims:
      example = 'x'.join(['4'] * chip.dims)
      raise UserError(f"a topology is chips along each axis, such as '{name}:{example}'; saw {shown(text)}")
    return cls(chip, tuple(map(int, shape)))

  def __str__(self) -> str:
    return f'{self.chip.name}:{"x".join(map(str, self.shape))}'

  @property
  def num_devices(self) -> int:
    return math.prod(self.shape) * self.chip.devices
