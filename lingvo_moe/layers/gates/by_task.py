"""Gates by task: all tokens of a language, or of a language pair, go to the same experts, whatever they are."""

import dataclasses

import tensorflow as tf

from lingvo_moe.config import fields
from lingvo_moe.core.weights import Specs
from lingvo_moe.layers.gates.top_k import TopK

_SEGMENTS = 2**16  # more than a row has


@dataclasses.dataclass(frozen=True)
class ByTarget(TopK):
  """Top-k gate by target language (task-level mixture of experts, Kudugunta et al., arXiv 2110.03742).

  It is TopK with a learnt vector of logits for each task in place of x W, balance loss included. Nothing is dropped,
  as a sentence's tokens all queue for the same experts. What one task uses is known before its text is, so that it can
  be taken out as a dense model (addons/export/pruning.py).
  """

  gate_tasks: tuple[tuple[str, tuple[int, ...]], ...] = dataclasses.field(default=(), kw_only=True)

  @property
  def tasks(self) -> int:
    return len(self.gate_tasks) or 1

  def check(self, num_experts: int) -> None:
    if self.choices == 1:
      fields.refuse(self, 'choices', '2 or more with a gate by task', 'its one weight would be 1, without a gradient')
    super().check(num_experts)

  def weights(self, model_dim: int, num_experts: int) -> Specs:
    weights = super().weights(self.tasks, num_experts)
    return weights | {'gate': dataclasses.replace(weights['gate'], dims='PJ', factored='PJ')}

  def auto_capacity_factor(self, num_experts: int) -> None:
    return None


class ByPair(ByTarget):
  """Gate by language pair; see ByTarget."""


def with_tasks(segments_BT: tf.Tensor, tasks_BT: tf.Tensor) -> tf.Tensor:
  """Segments that also hold the number of the task of each; equal ones stay equal, and padding 0."""
  return tf.where(segments_BT > 0, segments_BT + _SEGMENTS * tasks_BT, 0)


def tasks_of(segments_BT: tf.Tensor) -> tf.Tensor:
  """Numbers of the tasks that `with_tasks` put into segments."""
  return segments_BT // _SEGMENTS
