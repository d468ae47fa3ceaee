"""Keys of a public configuration class, each in one column: honoured, accepted at one value alone, or without effect.

A family states its class's keys in a `Keys`; `resolve` reads a config.json by them. PretrainedConfig's are stated here.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from lingvo_moe.core.errors import UserError, shown
from lingvo_moe.storage.json_files import Kind

# Values of a search that transformers reads, and their defaults. A folder without generation_config.json states them in
# config.json.
GENERATION = {
  'max_length': 20, 'min_length': 0, 'do_sample': False, 'early_stopping': False, 'num_beams': 1, 'temperature': 1.0,
  'top_k': 50, 'top_p': 1.0, 'typical_p': 1.0, 'repetition_penalty': 1.0, 'length_penalty': 1.0,
  'no_repeat_ngram_size': 0, 'encoder_no_repeat_ngram_size': 0, 'bad_words_ids': None, 'num_return_sequences': 1,
  'output_scores': False, 'return_dict_in_generate': False, 'forced_bos_token_id': None, 'forced_eos_token_id': None,
  'remove_invalid_values': False, 'exponential_decay_length_penalty': None, 'suppress_tokens': None,
  'begin_suppress_tokens': None, 'num_beam_groups': 1, 'diversity_penalty': 0.0,
}  # fmt: skip
# When beam search ends, by our names; False there is our heuristic without further symbols.
EARLY_STOPPING = {'exact': 'never', 'heuristic': False, 'first': True}
# Of PretrainedConfig: how results are returned, types of weights in memory, other tasks, and where a model came from.
_INERT = (
  'name_or_path _name_or_path _commit_hash architectures transformers_version dtype torch_dtype use_bfloat16 use_cache '
  'output_hidden_states output_attentions return_dict chunk_size_feed_forward gradient_checkpointing '
  'attn_implementation _attn_implementation tf_legacy_loss finetuning_task id2label label2id num_labels problem_type '
  'task_specific_params prefix bos_token_id sep_token_id'
).split()
# Of PretrainedConfig and of its cache: each makes another graph, or other weights.
_ONLY = {
  'is_decoder': False, 'add_cross_attention': False, 'cross_attention_hidden_size': None, 'tie_encoder_decoder': False,
  'torchscript': False, 'pruned_heads': {}, 'quantization_config': None, 'sliding_window': None, 'layer_types': None,
  'attention_chunk_size': None, 'num_kv_shared_layers': None,
}  # fmt: skip

# Activations by their names there: ours, and ours of a gated layer. GELU here is the one with a tanh.
ACTIVATIONS = {
  'relu': ('relu', None),
  'swish': ('swish', 'swiglu'),
  'silu': ('swish', 'swiglu'),
  'gelu_new': ('gelu', 'geglu'),
  'gelu_pytorch_tanh': ('gelu', 'geglu'),
}

FLAG = Kind('true or false', lambda value: type(value) is bool)


def number(least: float = 0.0, below: float = math.inf) -> Kind:
  """Number in a range."""
  fits = lambda value: type(value) in (int, float) and least <= value < below
  bounds = [f'from {least:g} on'] * (least > -math.inf) + [f'below {below:g}'] * (below < math.inf)
  return Kind(', '.join(['a number', *bounds]), fits)


def whole(least: int = 1, most: int = 1 << 20, step: int = 1) -> Kind:
  """Whole number in a range, a multiple of a step."""
  of_step = f', a multiple of {step}' if step > 1 else ''
  fits = lambda value: type(value) is int and least <= value <= most and value % step == 0
  return Kind(f'a whole number from {least} to {most}{of_step}', fits)


def one_of(*values: Any) -> Kind:
  """One of several JSON values; true and false are no numbers."""
  fits = lambda value: any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values)
  return Kind(' or '.join(map(repr, values)), fits)


SIZE, TOKEN, NUMBER, SHARE = whole(), whole(0), number(), number(below=1)


class Key(NamedTuple):
  """Key that is honoured."""

  default: Any  # the public class's, for a folder without the key; ...: derived from other keys
  kind: Kind  # values that are understood here


def of(kind: Kind, **defaults: Any) -> dict[str, Key]:
  """Keys of a kind, by their defaults."""
  return {name: Key(default, kind) for name, default in defaults.items()}


@dataclasses.dataclass(frozen=True)
class Keys:
  """Keys of a public class, but for those of PretrainedConfig that no family honours."""

  model_type: str  # as config.json names the class
  tokenizers: tuple[str, ...]  # names of the tokeniser's class, without 'Fast'
  honoured: Mapping[str, Key]
  only: Mapping[str, Any]  # the class's defaults, at which alone they are accepted
  inert: str  # names of keys without effect on inference
  aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)  # other names of keys, which must agree

  def column(self, name: str) -> str:
    """Column of a key: 'honoured', 'only', 'inert' or, of one that the class does not read, ''."""
    if name in self.honoured or name in self.aliases or name in ('model_type', 'tokenizer_class'):
      return 'honoured'
    if name in self.only or name in _ONLY:
      return 'only'
    return 'inert' if name in (*self.inert.split(), *_INERT, *GENERATION) else ''

  def resolve(self, path: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the class's keys that have an effect, with its defaults for those that are missing and not derived.

    Raises:
      UserError: names a key whose value would make another model, with what can be imported.
    """
    values = {**self.only, **{name: config.get(name, key.default) for name, key in self.honoured.items()}}
    values = {name: value for name, value in values.items() if value is not ...}
    kinds = {name: key.kind for name, key in self.honoured.items() if name in values}
    kinds |= {name: one_of(value) for name, value in {**_ONLY, **self.only}.items() if name in config}
    kinds |= {name: one_of(values[main]) for name, main in self.aliases.items() if name in config}
    self._check(path, {**values, **config}, kinds | {'model_type': one_of(None, self.model_type)})
    self.check_tokenizer(path, config)
    return values

  def check_tokenizer(self, path: str, settings: Mapping[str, Any]) -> None:
    """Raises UserError where settings, of config.json or tokenizer_config.json, name another tokeniser."""
    names = [name + fast for name in self.tokenizers for fast in ('', 'Fast')]
    self._check(path, settings, {'tokenizer_class': one_of(None, *names)})

  def _check(self, path: str, values: Mapping[str, Any], kinds: Mapping[str, Kind]) -> None:
    for name, kind in kinds.items():
      if not kind.fits(value := values.get(name)):
        raise UserError(
          f'{path}: {name} of a {self.model_type} model must be {kind.name}, as others are not supported; saw '
          f'{shown(value)}'
        )

  def unread(self, config: Mapping[str, Any]) -> list[str]:
    """Keys that the class does not read."""
    return sorted(name for name in config if not self.column(name))
