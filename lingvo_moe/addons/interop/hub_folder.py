"""Folder of a model as Hugging Face's hub lays it out: config.json, safetensors files, files of the tokeniser.

Weights may also be in files of torch.save, where torch is installed. Nothing in a folder is executed. A link in it must
not lead out of it, but to the blobs/ of the hub's cache that it is in. A tensor is read when it is asked for, so a
folder may be larger than memory.
"""

import functools
import json
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import safetensors

from lingvo_moe.addons.interop import pickled
from lingvo_moe.core.errors import UserError, closest
from lingvo_moe.storage import files, json_files

WHOLE, INDEX = 'model.safetensors', 'model.safetensors.index.json'
WEIGHTS = ((WHOLE, INDEX), ('pytorch_model.bin', 'pytorch_model.bin.index.json'))
SETTINGS = (
  'config.json', 'generation_config.json', 'tokenizer_config.json', 'special_tokens_map.json', 'added_tokens.json'
)  # fmt: skip
TYPES = {'F32': np.float32, 'F16': np.float16, 'BF16': ml_dtypes.bfloat16}
_SHARED = re.compile(r'[0-9a-f]{2}/[0-9a-f]{64}')
_NAMES = {np.dtype(dtype): name for name, dtype in TYPES.items()}


class TensorInfo(NamedTuple):
  """Where a tensor is, and what it is."""

  file: str
  shape: tuple[int, ...]
  dtype: str  # safetensors' name: 'F32', 'I64'

  @property
  def is_integer(self) -> bool:
    return self.dtype not in TYPES and self.dtype[0] in 'IUB'


class HubFolder:
  """A model's folder; `config` has the contents of config.json."""

  def __init__(self, path: str):
    self.path = path
    if not os.path.isdir(path):
      raise UserError(f'a model is a folder with config.json and model.safetensors; there is no folder {path}')
    self.config = self.json('config.json')
    self._pickled = functools.cache(self._unpickle)

  def file(self, name: str) -> str:
    """Path of a file; UserError where a link leads from it to anywhere but the files of this model."""
    path = os.path.join(self.path, name)
    if not files.is_inside(path, self.path) and not self._is_in_cache(path):
      raise UserError(
        f'{path} must be a file of its own, or a link into blobs/ of the same folder models--*, as in the cache of the '
        f'hub; it leads to {os.path.realpath(path)}: copy that file'
      )
    return path

  def _is_in_cache(self, path: str) -> bool:
    """Whether a path leads to blobs/ of models--NAME or of its cache, where this folder is models--NAME/snapshots/HASH.

    Since huggingface_hub 2, files that several models share are in the cache's own.
    """
    snapshots, _ = os.path.split(os.path.realpath(self.path))
    model, name = os.path.split(snapshots)
    is_cache = name == 'snapshots' and os.path.basename(model).startswith('models--')
    target, shared = os.path.realpath(path), os.path.join(os.path.dirname(model), 'blobs', '')
    is_shared = target.startswith(shared) and _SHARED.fullmatch(target.removeprefix(shared))
    return is_cache and bool(is_shared or target.startswith(os.path.join(model, 'blobs', '')))

  def json(self, name: str, kind: json_files.Kind | None = None, **kinds: json_files.Kind) -> dict[str, Any]:
    """Contents of a JSON file of the folder; UserError where it is missing or damaged.

    All its values are of a kind, or those of some keys.
    """
    try:
      # A tokeniser without a limit states one of 101 bits.
      read = json_files.read(self.file(name), f'the {name} of a model', 'fetch it again', long_integers=True, **kinds)
      if kind and (odd := next((key for key, value in read.items() if not kind.fits(value)), None)):
        raise UserError(f'{self.file(name)}: {odd!r} must be {kind.name}: fetch it again')
      return read
    except FileNotFoundError:
      raise UserError(f'{self.path} has no {name}: fetch the whole folder of the model') from None
    except OSError as e:
      raise UserError(f'{self.path} has no {name} that can be read ({e.strerror}): fetch it again') from None

  def json_if_any(self, name: str, **kinds: json_files.Kind) -> dict[str, Any]:
    return self.json(name, **kinds) if self.has(name) else {}

  def has(self, name: str) -> bool:
    return os.path.exists(self.file(name))

  def need(self, *names: str) -> list[str]:
    """Paths of files that must be there."""
    if missing := [name for name in names if not os.path.isfile(self.file(name))]:
      raise UserError(f'{self.path} has no {missing[0]}, which this model needs for its vocabulary: fetch it too')
    return [self.file(name) for name in names]

  @functools.cached_property
  def tensors(self) -> Mapping[str, TensorInfo]:
    """All tensors by name.

    Raises:
      UserError: there are none; a file is damaged, or a pickle of more than tensors; an index names a file elsewhere.
    """
    tensors_by_name = {}
    for name in self._files():
      if name.endswith('.bin'):
        for tensor, array in self._pickled(name).items():
          dtype = f'{array.dtype.kind.upper()}{8 * array.dtype.itemsize}'
          tensors_by_name[tensor] = TensorInfo(name, array.shape, _NAMES.get(array.dtype, dtype))
        continue
      try:
        with safetensors.safe_open(self.file(name), 'np') as opened:
          for tensor in opened.keys():
            part = opened.get_slice(tensor)
            tensors_by_name[tensor] = TensorInfo(name, tuple(part.get_shape()), part.get_dtype())
      except (safetensors.SafetensorError, OSError) as e:
        raise self._damaged(name, e) from None
    return tensors_by_name

  def read(self, name: str, rows: slice = slice(None)) -> np.ndarray:
    """A tensor, or rows of it, in the type that it has in its file; UserError if there is none of that name."""
    if name not in self.tensors:
      raise UserError(f'{self.path} has no tensor {name!r}; {closest(name, self.tensors)}: it is cut short, or another')
    file = self.tensors[name].file
    if file.endswith('.bin'):
      return self._pickled(file)[name][rows]
    try:
      with safetensors.safe_open(self.file(file), 'np') as opened:
        return opened.get_slice(name)[rows] if self.tensors[name].shape else opened.get_tensor(name)
    except (safetensors.SafetensorError, OSError) as e:
      raise self._damaged(file, e) from None

  def _unpickle(self, name: str) -> Mapping[str, np.ndarray]:
    model = f'transformers.{self.config.get("architectures", ["AutoModel"])[0]}.from_pretrained({self.path!r})'
    return pickled.read(self.file(name), f'import OTHER, which {model}.save_pretrained("OTHER") writes')

  def _files(self) -> list[str]:
    for whole, index in WEIGHTS:
      if os.path.isfile(self.file(whole)):
        return [whole]
      if os.path.isfile(self.file(index)):
        return sorted({self._inside(name, index) for name in self.weight_map(index).values()})
    raise UserError(f'{self.path} has neither {WHOLE} nor {INDEX}: fetch the whole folder of the model')

  def weight_map(self, index: str) -> Mapping[str, str]:
    """Files of the shards by tensor, as an index has them; UserError where it is damaged."""
    weight_map, texts = self.json(index).get('weight_map'), json_files.by_name(json_files.TEXT)
    if not json_files.PLAIN_OBJECT.fits(weight_map) or not texts.fits(weight_map):
      raise UserError(f'{self.file(index)} must have a weight_map, tensor -> file; saw {json.dumps(weight_map)[:60]}')
    for name in weight_map.values():
      if os.path.basename(name) != name or name in ('', '.', '..'):
        raise UserError(f'{self.file(index)} must name files of its own folder; saw {name!r}: fetch the model again')
    return weight_map

  def _inside(self, name: str, index: str) -> str:
    if not os.path.isfile(self.file(name)):
      raise UserError(f'{self.file(index)} names {name}, which is not there: fetch the whole folder of the model')
    return name

  def _damaged(self, name: str, error: Exception) -> UserError:
    return UserError(f'{self.file(name)} is damaged or cut short ({str(error).splitlines()[0]}): fetch it again')
