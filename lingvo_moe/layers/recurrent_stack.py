"""LSTM layer, and a stack of it: an LSTM, experts for all positions of the batch at once, and a second LSTM.

Shazeer et al., 'Outrageously Large Neural Networks' (arXiv 1701.06538), section 5.1 and appendix C.1.
"""

import dataclasses
from typing import NamedTuple

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core import prng
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.weights import Constant, Specs, Theta, WeightSpec, glorot_uniform
from lingvo_moe.layers.attention import Now
from lingvo_moe.layers.ffn import FeedForward
from lingvo_moe.layers.gates.routing import Routed
from lingvo_moe.layers.moe import MoE
from lingvo_moe.xla_sharding import shard

# States by layer, 'output' and 'cell': [B, 1, U, features], those after each flat position.
RecurrentCache = dict[str, dict[str, tf.Tensor]]

_FIRST, _MIDDLE, _SECOND = map(weights_lib.layer_name, range(3))


class LstmState(NamedTuple):
  """State of an LSTM after each position, or after the last symbol of each hypothesis (T = W)."""

  output_BTM: tf.Tensor
  cell_BTH: tf.Tensor  # float32


@dataclasses.dataclass(frozen=True)
class Lstm:
  """LSTM with forget gates (Gers et al., 2000) of forget bias 1, without peepholes; ops.lstm_cell has the formula.

  The input's part of the preactivations is one product over all positions; the loop over positions computes the rest.
  Axis J of a weight has input gate, forget gate, candidate, output gate.
  """

  model_dim: int  # M, features of inputs and outputs
  # H, units; 0: M. Others are projected to M outputs, which the next position gets (Sak et al., arXiv 1402.1128).
  cell_dim: int = 0

  @property
  def hidden_dim(self) -> int:
    return self.cell_dim or self.model_dim

  def weights(self) -> Specs:
    m, h = self.model_dim, self.hidden_dim
    into = WeightSpec((m, 4, h), 'MJH', glorot_uniform(m, h), factored='MH')
    projection = {'wo': WeightSpec((h, m), 'HM', glorot_uniform(h, m), factored='HM')} if h != m else {}
    return {'wi': into, 'wr': into, 'bi': WeightSpec((4, h), 'JH', Constant(0.0)), **projection}

  def __call__(self, theta: Theta, x_BTM: tf.Tensor, begins_BT: tf.Tensor) -> LstmState:
    """States after every position of whole rows; the state is zero before a position where begins_BT is True."""
    z_BTJH = shard(ops.linear(x_BTM, theta['wi'], theta['bi']), 'BTJH')
    output_BTM, cell_BTH = ops.lstm(z_BTJH, begins_BT, theta['wr'], theta.get('wo'))
    return LstmState(shard(output_BTM, 'BTM'), shard(cell_BTH, 'BTH'))

  def step(self, theta: Theta, x_BWM: tf.Tensor, state: LstmState) -> LstmState:
    """States after one more symbol of each hypothesis, given the states before the symbol."""
    z_BWJH = ops.linear(x_BWM, theta['wi'], theta['bi']) + ops.linear(state.output_BTM, theta['wr'])
    hidden_BWH, cell_BWH = ops.lstm_cell(shard(z_BWJH, 'BWJH'), state.cell_BTH)
    output_BWM = ops.linear(hidden_BWH, theta['wo']) if 'wo' in theta else hidden_BWH
    return LstmState(shard(output_BWM, 'BWM'), shard(cell_BWH, 'BWH'))


@dataclasses.dataclass(frozen=True)
class RecurrentStack:
  """LSTM, experts or a dense feed-forward, LSTM; each adds dropout(its output) to its input.

  The output of the middle layer goes through a sigmoid first. There is no normalisation. The state is zero at the
  beginning of each row, and of each segment in it.

  In decoding, the cache holds the state after each symbol at the flat position of the symbol. The state of a hypothesis
  is at the last of its positions, so states are not reordered with hypotheses; see search/flat_sequence.py.
  """

  lstm: Lstm  # both LSTMs
  ffn: FeedForward  # middle layer without experts
  moe: MoE | None = None  # middle layer with experts; None: `ffn`
  residual_dropout: float = 0.0  # dropout of the output of every layer

  def weights(self) -> Specs:
    lstm = {'lstm': self.lstm.weights()}
    middle = {'moe': self.moe.weights()} if self.moe else {'ffn': self.ffn.weights()}
    return {_FIRST: lstm, _MIDDLE: middle, _SECOND: lstm}

  def __call__(
    self, theta: Theta, x_BTM: tf.Tensor, segments_BT: tf.Tensor, *, key: tf.Tensor | None = None
  ) -> tuple[tf.Tensor, dict[str, Routed]]:
    """Runs over whole rows: ([B, T, M], {layer name: Routed} of the experts). See Stack.__call__."""
    begins_BT = tf.pad(segments_BT[:, 1:] != segments_BT[:, :-1], [[0, 0], [1, 0]], constant_values=True)
    x_BTM, _, routed = self._run(theta, x_BTM, tf.cast(segments_BT == 0, tf.float32), begins_BT, key=key)
    return x_BTM, routed

  def read(self, theta: Theta, x_BTM: tf.Tensor, real_BT: tf.Tensor, window: int) -> RecurrentCache:
    """Cache of T flat positions after reading the first symbols of each row; see Stack.read. `window` has no effect."""
    begins_BT = tf.broadcast_to(tf.range(sizes(x_BTM)[1])[tf.newaxis] == 0, sizes(x_BTM)[:2])
    _, states, _ = self._run(theta, x_BTM, 1.0 - tf.cast(real_BT, tf.float32), begins_BT)
    return {name: _positions(state) for name, state in states.items()}

  def extend(
    self, theta: Theta, x_BWM: tf.Tensor, now: Now, memory_segments_BU: None, cache: RecurrentCache
  ) -> tuple[tf.Tensor, RecurrentCache]:
    """Decoding step of W hypotheses a row, at inference; see Stack.extend.

    Each hypothesis goes on from the state at the last of its positions before now.start; without any, from zero.
    """
    position_U = tf.range(sizes(now.mask_BWU)[2])
    before_BWU = (now.mask_BWU > 0) & (position_U < now.start)
    last_BW = tf.reduce_max(tf.where(before_BWU, position_U + 1, 0), axis=2)  # its position + 1; 0: none
    live_BW = tf.ones(sizes(x_BWM)[:2], tf.bool) if now.live_BW is None else now.live_BW
    before = {name: _state_at(of_layer, last_BW) for name, of_layer in cache.items()}
    x_BWM, states, _ = self._run(theta, x_BWM, 1.0 - tf.cast(live_BW, tf.float32), before=before)
    written = {}
    for name, state in states.items():
      positions = _positions(state).items()
      written[name] = {part: ops.write_cache(cache[name][part], x, now.start) for part, x in positions}
    return x_BWM, written

  def keep_positions(self, cache: RecurrentCache, positions_BU: tf.Tensor) -> RecurrentCache:
    """Cache gathered at these flat positions; see flat_sequence.loop."""
    return tf.nest.map_structure(lambda buffer: tf.gather(buffer, positions_BU, axis=2, batch_dims=1), cache)

  def _run(self, theta, x_BTM, paddings_BT, begins_BT=None, before=None, key=None):
    """Runs the layers in order: (x, states by layer, {layer name: Routed} of experts).

    Over whole rows, states are zero before a position where begins_BT is True. In decoding, x has one symbol of each
    hypothesis, and `before` the states before it by layer.
    """
    x_BTM, first = self._recurrent(_FIRST, theta, x_BTM, begins_BT, before, key)
    x_BTM, routed = self._middle(theta, x_BTM, paddings_BT, key)
    x_BTM, second = self._recurrent(_SECOND, theta, x_BTM, begins_BT, before, key)
    return x_BTM, {_FIRST: first, _SECOND: second}, routed

  def _recurrent(self, name, theta, x_BTM, begins_BT, before, key):
    """Runs an LSTM: (its input plus its output, its states); see `_run`."""
    with tf.name_scope(f'{name}/lstm'):
      lstm_theta = weights_lib.cast(theta[name]['lstm'], self.lstm.weights(), x_BTM.dtype)
      if before is None:
        state = self.lstm(lstm_theta, x_BTM, begins_BT)
      else:
        state = self.lstm.step(lstm_theta, x_BTM, before[name])
      return x_BTM + self._dropout(state.output_BTM, key, name), state

  def _middle(self, theta, x_BTM, paddings_BT, key=None):
    """Runs the layer between the LSTMs on all positions at once: ([B, T, M], {layer name: Routed} of experts)."""
    middle_theta = weights_lib.cast(theta[_MIDDLE], self.weights()[_MIDDLE], x_BTM.dtype)
    key = prng.fold(key, _MIDDLE)
    if self.moe is None:
      with tf.name_scope(f'{_MIDDLE}/ffn'):
        y_BTM = self.ffn(middle_theta['ffn'], x_BTM, prng.fold(key, 'ffn'))
        return x_BTM + self._dropout(tf.sigmoid(y_BTM), key, 'residual'), {}
    with tf.name_scope(f'{_MIDDLE}/moe'):
      y_BTM, routing = self.moe(middle_theta['moe'], x_BTM, paddings_BT, prng.fold(key, 'gate'))
      x_BTM += self._dropout(tf.sigmoid(y_BTM), key, 'residual')
    return shard(x_BTM, 'BTM'), {_MIDDLE: routing.routed}

  def _dropout(self, y_BTM: tf.Tensor, key: tf.Tensor | None, name: str) -> tf.Tensor:
    return prng.dropout(y_BTM, self.residual_dropout, prng.fold(key, name))


def _positions(state: LstmState) -> dict[str, tf.Tensor]:
  """States [B, 1, T, features] by part, as a cache has them."""
  return {'output': state.output_BTM[:, tf.newaxis], 'cell': state.cell_BTH[:, tf.newaxis]}


def _state_at(cache: dict[str, tf.Tensor], last_BW: tf.Tensor) -> LstmState:
  """States of hypotheses at position last_BW - 1; zero where last_BW is 0."""
  at_BW, exists_BW1 = tf.maximum(last_BW - 1, 0), (last_BW > 0)[..., tf.newaxis]
  output_BWM = tf.where(exists_BW1, tf.gather(cache['output'][:, 0], at_BW, batch_dims=1), 0)
  cell_BWH = tf.where(exists_BW1, tf.gather(cache['cell'][:, 0], at_BW, batch_dims=1), 0)
  return LstmState(shard(output_BWM, 'BWM'), shard(cell_BWH, 'BWH'))
