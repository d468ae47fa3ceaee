"""Weights of a file of torch.save (pytorch_model.bin) as NumPy arrays; nothing in the file is executed."""

import pickle
import warnings
import zipfile

import ml_dtypes
import numpy as np

from lingvo_moe.core import errors
from lingvo_moe.core.errors import UserError

_SAFE = 2, 10  # before, weights_only=True could be made to run code (CVE-2025-32434, CVE-2026-24747)


def read(path: str, way_out: str) -> dict[str, np.ndarray]:
  """Tensors by name, mapped into memory where the file is of torch 1.6 or later.

  Raises:
    UserError: torch is not there, or the file holds anything but tensors; `way_out` ends the message.
  """
  try:
    import torch
  except ImportError as e:
    missing = errors.not_installed(f'{path} is a pickle; to read it without running it needs torch', e, 'torch')
    raise UserError(f'{missing}, or {way_out}') from None
  if tuple(map(int, torch.__version__.split('.')[:2])) < _SAFE:
    least = '.'.join(map(str, _SAFE))
    raise UserError(
      f'{path} is a pickle, which torch>={least} reads without running it; saw {torch.__version__}: {way_out}'
    )
  try:
    with warnings.catch_warnings(action='ignore'):  # about the protocol of a pickle
      tensors = torch.load(path, map_location='cpu', weights_only=True, mmap=zipfile.is_zipfile(path))
    arrays = {}
    for name, tensor in tensors.items():
      is_bfloat16 = tensor.dtype == torch.bfloat16  # which NumPy has not
      arrays[name] = tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if is_bfloat16 else tensor.numpy()
    return arrays
  except Exception as e:  # whatever a damaged or hostile pickle leads to
    refused = isinstance(e, pickle.UnpicklingError)  # whose text advises to load it all the same
    seen = 'more, which torch does not load' if refused else errors.reason(e)[:200]
  raise UserError(f'{path} must hold tensors by name and nothing else; saw {seen}: fetch it again, or {way_out}')
