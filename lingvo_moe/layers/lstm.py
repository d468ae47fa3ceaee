"""LSTM layer: over the positions of whole rows, and one step at a time for decoding."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core.weights import Constant, Specs, Theta, WeightSpec, glorot_uniform
from lingvo_moe.xla_sharding import shard


class LstmState(NamedTuple):
  """State of an LSTM after each position, or after the last symbol of each hypothesis (T = W)."""

  output_BTM: tf.Tensor
  cell_BTH: tf.Tensor  # float32


@dataclasses.dataclass(frozen=True)
class Lstm:
  """LSTM with forget gates (Gers et al., 2000) of forget bias 1, without peepholes; ops.lstm_cell has the formula.

  The input's part of the preactivations is one product over all positions; the loop over positions has the rest.
  Axis J of a weight has the four: input gate, forget gate, candidate, output gate.

  Attributes:
    model_dim: M, features of inputs and outputs.
    cell_dim: H, units; 0: M. Others are projected to M outputs, which the next position gets (Sak et al., arXiv
      1402.1128).
  """

  model_dim: int
  cell_dim: int = 0

  @property
  def hidden_dim(self) -> int:
    return self.cell_dim or self.model_dim

  def weights(self) -> Specs:
    m, h = self.model_dim, self.hidden_dim
    into = lambda: WeightSpec((m, 4, h), 'MJH', glorot_uniform(m, h), factored='MH')
    projection = {'wo': WeightSpec((h, m), 'HM', glorot_uniform(h, m), factored='HM')} if h != m else {}
    return {'wi': into(), 'wr': into(), 'bi': WeightSpec((4, h), 'JH', Constant(0.0)), **projection}

  def __call__(self, theta: Theta, x_BTM: tf.Tensor, begins_BT: tf.Tensor) -> LstmState:
    """States after every position of whole rows; the state is zero before a position where begins_BT is True."""
    z_BTJH = shard(ops.linear(x_BTM, theta['wi'], theta['bi']), 'BTJH')
    output_BTM, cell_BTH = ops.lstm(z_BTJH, begins_BT, theta['wr'], theta.get('wo'))
    return LstmState(shard(output_BTM, 'BTM'), shard(cell_BTH, 'BTH'))

  def step(self, theta: Theta, x_BWM: tf.Tensor, state: LstmState) -> LstmState:
    """States after one more symbol of each hypothesis, given those before it."""
    z_BWJH = ops.linear(x_BWM, theta['wi'], theta['bi']) + ops.linear(state.output_BTM, theta['wr'])
    hidden_BWH, cell_BWH = ops.lstm_cell(shard(z_BWJH, 'BWJH'), state.cell_BTH)
    output_BWM = ops.linear(hidden_BWH, theta['wo']) if 'wo' in theta else hidden_BWH
    return LstmState(shard(output_BWM, 'BWM'), shard(cell_BWH, 'BWH'))
