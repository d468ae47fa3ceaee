"""CTranslate2 model of a dense translation model (https://opennmt.net/CTranslate2), by its public converter interface.

Both have layers with normalisation first, embeddings scaled by sqrt(M), sinusoidal positions (there as a table), ReLU,
an output softmax shared with the target embedding, bos before the target, and eos behind source and target. CTranslate2
has no experts; it takes pieces, so that the vocabularies lie beside the model; and its beam search has a length penalty
and an end of its own, by which some translations differ though every probability is equal.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_moe.config import same_function
from lingvo_moe.core import errors
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.errors import UserError, listed
from lingvo_moe.layers.embedding import sinusoidal_positions
from lingvo_moe.tasks.mt.mt_config import MtConfig
from lingvo_moe.vocab.sentencepiece_vocab import BOS, EOS, UNK, TaggedVocab

_POSITIONS = 2048  # in the table, at least: CTranslate2 refuses a search that goes on beyond it

# Fields of which it has any value.
_SIZES = 'source_vocab_size target_vocab_size shared_vocab encoder_layers decoder_layers model_dim ff_dim num_heads'
_FREE = (*_SIZES.split(), 'head_dim', 'max_length', 'tag_target')


def require(config: MtConfig) -> None:
  """Raises UserError where the model has experts or layers of another kind, or ctranslate2 is not installed."""
  if config.num_experts:
    raise UserError(
      f'CTranslate2 has no mixture of experts, and this model has num_experts={config.num_experts}: use '
      '--format=saved_model, or export a dense model'
    )
  names = {*_FREE, *same_function.free_fields(config)} & {field.name for field in dataclasses.fields(MtConfig)}
  plain = MtConfig(**{name: getattr(config, name) for name in names})
  if not same_function.is_same(config, plain):
    raise UserError(
      '--format=ctranslate2 has layers with the defaults of a translation model; saw '
      f'{same_function.differing(config, plain)}: use --format=litert'
    )
  try:
    import ctranslate2  # noqa: F401
  except ImportError as e:
    raise errors.not_installed('--format=ctranslate2 needs ctranslate2', e, 'ctranslate2') from None


def save(
  folder: str,
  config: MtConfig,
  vocabs: tuple[TaggedVocab, TaggedVocab],
  weights: Mapping[str, np.ndarray],
  quantization: str | None = None,
) -> None:
  """Writes the model, with source.model and target.model, the SentencePiece models of its vocabularies.

  Args:
    folder: path, which is made anew.
    config: configuration of a model without experts, unrolled.
    vocabs: (source vocabulary, target vocabulary).
    weights: float32 arrays by flat name.
    quantization: type of the matrices in the file, such as int8; None: float32.
  """
  from ctranslate2.converters import Converter

  class OfRun(Converter):
    def _load(self):
      return _spec(config, vocabs, weights_lib.unflatten(weights))

  OfRun().convert(folder, quantization=quantization, force=True)
  for vocab, side in zip(vocabs, ('source', 'target'), strict=True):
    with open(os.path.join(folder, f'{side}.model'), 'wb') as f:
      f.write(vocab.model_bytes)


def _spec(config: MtConfig, vocabs: tuple[TaggedVocab, TaggedVocab], theta: dict[str, Any]) -> Any:
  """ctranslate2.specs.TransformerSpec with these weights, each of which is taken out of `theta`."""
  from ctranslate2.specs import transformer_spec

  program = config.program()
  model = program.model
  sizes = {'num_heads': config.num_heads, 'pre_norm': True, 'head_dim': config.head_dim}
  encoder = transformer_spec.TransformerEncoderSpec(config.encoder_layers, **sizes)
  decoder = transformer_spec.TransformerDecoderSpec(config.decoder_layers, **sizes)
  spec = transformer_spec.TransformerSpec(encoder, decoder)
  spec.config.layer_norm_epsilon = model.encoder.norm.epsilon
  spec.config.add_source_eos = True
  source, target = vocabs
  bos, eos, unk = target.pieces([BOS, EOS, UNK])
  spec.config.bos_token = spec.config.decoder_start_token = bos
  spec.config.eos_token, spec.config.unk_token = eos, unk
  spec.register_source_vocabulary(source.pieces(range(source.size)))
  spec.register_target_vocabulary(target.pieces(range(target.size)))

  target_table = theta['target_embedding'].pop('table')
  encoder.embeddings[0].weight = theta.get('source_embedding', {}).pop('table', target_table)
  decoder.embeddings.weight = decoder.projection.weight = target_table
  positions_1T = tf.range(max(_POSITIONS, config.max_length))[tf.newaxis]
  positions = sinusoidal_positions(positions_1T, config.model_dim)[0].numpy()
  for stack, stack_weights in ((encoder, theta['encoder']), (decoder, theta['decoder'])):
    stack.position_encodings.encodings = positions
    _set_norm(stack.layer_norm, stack_weights['norm'])
    for number, layer in enumerate(stack.layer):
      _set_layer(layer, stack_weights[weights_lib.layer_name(number)])
  if unread := weights_lib.flatten(theta):
    raise UserError(f'CTranslate2 has no place for all weights of this model ({listed(unread)}): use --format=litert')
  return spec


def _set_layer(layer: Any, layer_weights: dict[str, Any]) -> None:
  _set_attention(layer.self_attention, layer_weights['attention'], 'qkv')
  if 'cross_attention' in layer_weights:
    _set_attention(layer.attention, layer_weights['cross_attention'], 'q', 'kv')
  _set_norm(layer.ffn.layer_norm, layer_weights['ffn']['norm'])
  _set_linear(layer.ffn.linear_0, layer_weights['ffn'].pop('wi'), layer_weights['ffn'].pop('bi'))
  _set_linear(layer.ffn.linear_1, layer_weights['ffn'].pop('wo'), layer_weights['ffn'].pop('bo'))


def _set_attention(attention: Any, attention_weights: dict[str, Any], *inputs: str) -> None:
  """Sets linear maps into queries, keys and values, by letters of those that are one map, and the one out of them."""
  _set_norm(attention.layer_norm, attention_weights['norm'])
  for linear, letters in zip(attention.linear, inputs):
    weights = [attention_weights.pop(f'w{letter}') for letter in letters]
    weights = [weight.reshape(weight.shape[0], -1) for weight in weights]
    zeros = np.zeros_like(attention_weights['bv'])  # keys have none
    biases = [attention_weights.pop(f'b{letter}', zeros).reshape(-1) for letter in letters]
    _set_linear(linear, np.concatenate(weights, axis=1), np.concatenate(biases))
  _set_linear(
    attention.linear[len(inputs)],
    attention_weights['wo'].reshape(-1, attention_weights.pop('wo').shape[-1]),
    attention_weights.pop('bo'),
  )


def _set_linear(linear: Any, weight_MJ: np.ndarray, bias_J: np.ndarray) -> None:
  linear.weight, linear.bias = np.ascontiguousarray(weight_MJ.T), bias_J


def _set_norm(norm: Any, norm_weights: dict[str, Any]) -> None:
  norm.gamma, norm.beta = norm_weights.pop('scale'), norm_weights.pop('bias')
