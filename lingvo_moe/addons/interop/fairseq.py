"""Names of tensors that the families of fairseq share: Marian, M2M100 and NLLB-200."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from lingvo_moe.addons.interop.config_keys import ACTIVATIONS, FLAG, SHARE, SIZE, TOKEN, of, one_of, whole
from lingvo_moe.addons.interop.tensor_table import TensorEntry, linear, norm, ours_of, their_activation, theirs_of

# Keys that are honoured alike; sinusoids of an odd d_model have another form in each class.
HONOURED = (
  of(SIZE, vocab_size=128_112, encoder_ffn_dim=4096, decoder_ffn_dim=4096)
  | of(SIZE, encoder_attention_heads=16, decoder_attention_heads=16, encoder_layers=12, decoder_layers=12)
  | of(whole(2, step=2), d_model=1024)
  | of(one_of(*ACTIVATIONS), activation_function='relu')
  | of(FLAG, scale_embedding=True)
  | of(SHARE, dropout=0.1, attention_dropout=0.1, activation_dropout=0.0)
  | of(TOKEN, decoder_start_token_id=2, pad_token_id=1, eos_token_id=2)
)
INERT = 'max_position_embeddings encoder_layerdrop decoder_layerdrop init_std num_hidden_layers'
ALIASES = {'num_attention_heads': 'encoder_attention_heads', 'hidden_size': 'd_model'}
_NAMES = {
  'd_model': 'model_dim',
  'encoder_ffn_dim': 'ff_dim',
  'encoder_attention_heads': 'num_heads',
  'encoder_layers': 'encoder_layers',
  'decoder_layers': 'decoder_layers',
  'dropout': 'residual_dropout',
  'attention_dropout': 'attention_dropout',
  'activation_dropout': 'ffn_dropout',
}


def attention(theirs: str, ours: str) -> Iterator[TensorEntry]:
  """Attention with biases, of which that of keys has no effect."""
  for name, weight, bias in (('q', 'wq', 'bq'), ('k', 'wk', ''), ('v', 'wv', 'bv'), ('out', 'wo', 'bo')):
    yield from linear(f'{theirs}.{name}_proj', ours, weight, bias)


def layers(
  config: Mapping[str, Any],
  cross_attention: str = 'encoder_attn',
  ffn: str = '',
  ffn_norm: str = 'final_layer_norm',
  sparse: Mapping[str, Collection[int]] | None = None,
) -> Iterator[TensorEntry]:
  """Layers of both stacks, of which `sparse` have experts.

  The names are those of cross-attention, of what is before fc1, and of its normalisation.
  """
  for stack in ('encoder', 'decoder'):
    for i in range(config[f'{stack}_layers']):
      theirs, ours = f'model.{stack}.layers.{i}', f'{stack}/layer_{i:02d}'
      yield from attention(f'{theirs}.self_attn', f'{ours}/attention')
      yield from norm(f'{theirs}.self_attn_layer_norm', f'{ours}/attention/norm')
      if stack == 'decoder':
        yield from attention(f'{theirs}.{cross_attention}', f'{ours}/cross_attention')
        yield from norm(f'{theirs}.{cross_attention}_layer_norm', f'{ours}/cross_attention/norm')
      if sparse and i in sparse[stack]:
        yield from norm(f'{theirs}.{ffn_norm}', f'{ours}/moe/norm')
        yield from linear(f'{theirs}.{ffn}router.classifier', f'{ours}/moe', 'gate')
        for e in range(config['num_experts']):
          yield from feed_forward(f'{theirs}.{ffn}experts.expert_{e}.', f'{ours}/moe', e)
      else:
        yield from norm(f'{theirs}.{ffn_norm}', f'{ours}/ffn/norm')
        yield from feed_forward(f'{theirs}.{ffn}', f'{ours}/ffn')


def embedding(config: Mapping[str, Any]) -> TensorEntry:
  """The table of both sides and, where it is tied, of the output."""
  copies = ('model.encoder.embed_tokens.weight', 'model.decoder.embed_tokens.weight')
  copies += ('lm_head.weight',) * config['tie_word_embeddings']
  return TensorEntry('model.shared.weight', 'target_embedding/table', 'symbols', copies=copies)


def feed_forward(theirs: str, ours: str, expert: int | None = None) -> Iterator[TensorEntry]:
  """Two linear layers."""
  yield from linear(f'{theirs}fc1', ours, 'wi', 'bi', expert)
  yield from linear(f'{theirs}fc2', ours, 'wo', 'bo', expert)


def sizes(config: Mapping[str, Any]) -> dict[str, Any]:
  """Values of the fields of a configuration that these families state alike."""
  for name in ('ffn_dim', 'attention_heads'):
    if config[f'encoder_{name}'] != config[f'decoder_{name}']:
      raise ValueError(f'decoder_{name}={config[f"decoder_{name}"]} is not encoder_{name}={config[f"encoder_{name}"]}')
  return ours_of(config, _NAMES) | dict(
    num_kv_heads=0,
    head_dim=config['d_model'] // config['encoder_attention_heads'],
    norm_epsilon=1e-5,
    embedding_scale=0.0 if config['scale_embedding'] else 1.0,
    activation=ACTIVATIONS[config['activation_function']][0],
    tied_output=config['tie_word_embeddings'],
    input_dropout=config['dropout'],
    shared_vocab=True,
  )


def form(ours: Any) -> dict[str, Any]:
  """Values of config.json by those of a configuration here: the inverse of `sizes`."""
  return theirs_of(ours, _NAMES) | dict(
    decoder_ffn_dim=ours.ff_dim,
    decoder_attention_heads=ours.num_heads,
    scale_embedding=not ours.embedding_scale,
    activation_function=their_activation(ours.activation)[1],
    tie_word_embeddings=ours.tied_output,
    max_position_embeddings=ours.max_length,
  )
