"""Peak figures of TPU generations and of GPUs, for rooflines: FLOP/s, memory, bandwidths and links of a device.

A device is a device in JAX and in a mesh: one of the two cores of a chip of v2, v3, v4 and tpu7x, and a whole chip of
v5e, v5p and v6e. (Machines with v4 usually show two cores as one device; a topology here shows both.)

Sources: Google's documentation of each generation, docs.cloud.google.com/tpu/docs/ v2, v3, v4, v5e, v5p, v6e, tpu7x:
peak FLOP/s, HBM and its bandwidth, divided by the devices of a chip. A link's bandwidth is one way: the documented
bandwidth of all links of a chip both ways (v5e, v5p, v6e, tpu7x), or the AllReduce bandwidth of a pod divided by its
links, which for v2 and v3 are the 496 and 656 Gbit/s of Jouppi et al., 'A domain-specific supercomputer for training
deep neural networks' (CACM 63(7), 2020), and for v4 45 GB/s. The usable part of the HBM is the limit that the compiler
reports for a program that does not fit (libtpu 0.0.42).

A GPU is one device. Sources: NVIDIA's data sheets of A100 80GB SXM, H100 SXM and H200 SXM: dense peak FLOP/s, memory
bandwidth, and half of NVLink's bandwidth, which counts both ways. Units and memory sizes are those in XLA's repository
(xla/backends/gpu/target_config/specs).
"""

import dataclasses
import math
from typing import ClassVar, Self

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

  def peak(self, dtype: str) -> float:
    """Peak FLOP/s of products of matrices of a type of HLO: that of bfloat16 for all."""
    return self.flops


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
class Gpu:
  """NVIDIA GPU: peak figures, under the names of those of a Chip, and what XLA's compiler reads of it.

  The GPUs of a host are linked by NVLink through switches: each sends at its full bandwidth, to whichever others.
  """

  name: str  # as in a topology, 'h100:8'
  flops: float  # peak FLOP/s in bfloat16, without sparsity
  float32_flops: float  # peak FLOP/s in TF32, in which XLA by default multiplies float32 matrices
  memory: int  # bytes
  hbm_bandwidth: float  # bytes/s
  link_bandwidth: float  # bytes/s of its NVLinks together, each way
  capability: str  # as XLA writes it
  cores: int  # streaming multiprocessors
  lanes: int  # float32 units of a core
  core_memory: int  # bytes of shared memory of a core, of which a block takes 1 KiB less at most
  cache: int  # bytes of the level 2 cache
  ghz: float  # highest clock

  devices: ClassVar[int] = 1
  clock: ClassVar[None] = None  # the compiler estimates no cycles
  reached: ClassVar[float] = 0.8  # share of the peaks: a large product on an H200 makes 790 TFLOP/s of 989

  @property
  def usable(self) -> float:
    """GiB that JAX takes of the memory; XLA_PYTHON_CLIENT_MEM_FRACTION sets another share than 0.75."""
    return 0.75 * self.memory / 2**30

  @property
  def target(self) -> str:
    """Description of the device for XLA's compiler, the text of a GpuTargetConfigProto."""
    return f"""gpu_device_info {{
  cuda_compute_capability {{ {self.capability} }}
  core_count: {self.cores} fpus_per_core: {self.lanes} clock_rate_ghz: {self.ghz}
  device_memory_size: {self.memory} memory_bandwidth: {self.hbm_bandwidth:.0f} l2_cache_size: {self.cache}
  shared_memory_per_core: {self.core_memory} shared_memory_per_block_optin: {self.core_memory - 1024}
  shared_memory_per_block: 49152 registers_per_core_limit: 65536 registers_per_block_limit: 65536
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}}
platform_name: "CUDA"
device_description_str: "{self.name}" """

  def peak(self, dtype: str) -> float:
    """Peak FLOP/s of products of matrices of a type of HLO."""
    return self.float32_flops if dtype == 'f32' else self.flops


_HOPPER = ('major: 9 feature_extension: ACCELERATED_FEATURES', 132, 128, 233_472, 52_428_800, 1.98)
_GPUS = (
  Gpu('a100', 312e12, 156e12, 85_100_068_864, 2039e9, 300e9, 'major: 8', 108, 64, 167_936, 41_943_040, 1.41),
  Gpu('h100', 989e12, 494.5e12, 84_942_979_072, 3350e9, 450e9, *_HOPPER),
  Gpu('h200', 989e12, 494.5e12, 151_397_597_184, 4800e9, 450e9, *_HOPPER),
)
GPUS = {gpu.name: gpu for gpu in _GPUS}
_GPUS_OF_HOST = 8


@dataclasses.dataclass(frozen=True)
class Topology:
  """TPU slice, a grid of chips of one generation: 'v3:32x32' is 1024 chips, 2048 cores; or GPUs of a host: 'h100:8'."""

  chip: Chip | Gpu
  shape: tuple[int, ...]

  @classmethod
  def parse(cls, text: str) -> Self:
    """Parses a topology such as 'v5p:4x4x4', 'h100' or 'h100:8'; UserError for an unknown device, or no such number."""
    name, _, sizes = text.partition(':')
    if name in GPUS:
      if text != name and not (sizes.isdecimal() and len(sizes) < 6 and 0 < int(sizes) <= _GPUS_OF_HOST):
        raise UserError(f"GPUs are 1 to {_GPUS_OF_HOST} of one host, such as '{name}:8'; saw {shown(text)}")
      return cls(GPUS[name], (int(sizes or 1),))
    if name not in CHIPS:
      raise UserError(f'there is no TPU or GPU {shown(name)}; {closest(name, [*CHIPS, *GPUS])}')
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
