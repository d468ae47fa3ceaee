"""Output softmax of a model: the embedding of the target, or weights of its own."""

import tensorflow as tf

from lingvo_moe.core.weights import Theta
from lingvo_moe.layers.embedding import CompetingOutputs, Embedding


class HasOutput:
  """A model whose output softmax shares the embedding of the target unless it has another."""

  target_embedding: Embedding
  output_embedding: Embedding | CompetingOutputs | None

  def output(self, theta: Theta) -> tuple[Embedding | CompetingOutputs, Theta]:
    """The output softmax and its weights."""
    name = 'output_embedding' if self.output_embedding else 'target_embedding'
    return getattr(self, name), theta[name]

  def scores(self, theta: Theta, x_BTM: tf.Tensor) -> tf.Tensor:
    """Logits of every next symbol, float32 [B, T, V], of inputs of the output softmax."""
    output, theta = self.output(theta)
    return output.logits(theta, x_BTM)
