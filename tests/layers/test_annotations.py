"""Annotations of layers on a mesh: a program is traced, not compiled."""

import collections
import dataclasses

import pytest
import tensorflow as tf
from random_theta import theta_of

from lingvo_moe import xla_sharding
from lingvo_moe.core import prng
from lingvo_moe.core.mesh import Mesh
from lingvo_moe.layers.attention import Attention, Now
from lingvo_moe.layers.ffn import FeedForward
from lingvo_moe.layers.moe import MoE
from lingvo_moe.layers.positions import RelativePositions
from lingvo_moe.layers.scanned_stack import ScannedStack
from lingvo_moe.layers.stack import Stack
from lingvo_moe.ops import backend, xla

STACK = Stack(2, Attention(8, 2, 4), FeedForward(8, 12), MoE(8, 12, num_experts=4, num_groups=4), causal=True)


def tiles(function, mesh):
  """Tiles of every annotation in the program of a function, the bodies of loops included."""
  with xla_sharding.use(Mesh.parse(mesh)), backend.use(xla.BACKEND):
    program = tf.function(function, autograph=False).get_concrete_function().graph.as_graph_def()
  nodes = [node for f in program.library.function for node in f.node_def] + list(program.node)
  found = [xla_sharding.OpSharding.FromString(n.attr['sharding'].s) for n in nodes if n.op == 'XlaSharding']
  return [
    tuple(sharding.tile_assignment_dimensions)[: -1 if sharding.replicate_on_last_tile_dim else None]
    for sharding in found
    if sharding.tile_assignment_dimensions
  ]


def decode(stack):
  """A decoding step."""

  def run():
    now = Now(tf.constant(0), tf.constant(0), tf.ones([4, 1, 5]))
    return stack.extend(theta, tf.ones([4, 1, 8]), now, None, stack.empty_cache(4, 5))

  theta = theta_of(stack)
  return run


@pytest.mark.parametrize(('kind', 'dispatch'), [(Stack, 'einsum'), (Stack, 'gather'), (ScannedStack, 'einsum')])
def test_activations_are_split_by_rows_or_groups_and_those_of_experts_by_experts(kind, dispatch):
  stack = kind(**{**vars(STACK), 'moe': dataclasses.replace(STACK.moe, dispatch=dispatch)})
  theta = theta_of(stack)
  train = lambda: stack(theta, tf.ones([4, 6, 8]), tf.ones([4, 6], tf.int32), key=prng.key(0))[0]
  found = set(tiles(train, 'data:2,expert:2'))
  required = {(4, 1, 1), (4, 1, 1, 1), (2, 2, 1, 1)}  # BTM, GSM and GSE; BNTU and BNUK; EGCM that experts claim first
  # Weights of experts, EMH, which a loop takes from a stack of them; LBNTU and LEGCM, which it keeps for the gradient.
  looped = {(2, 1, 1), (1, 4, 1, 1, 1), (1, 2, 2, 1, 1)}
  assert required <= found <= required | looped | {(1, 4, 1, 1)}  # EGCM that groups claim first, LBTM
  assert found & looped == (looped if kind is ScannedStack else set())


@pytest.mark.parametrize('kind', [Stack, ScannedStack])
def test_a_cache_is_split_by_rows_and_heads(kind):
  assert (2, 2, 1, 1) in [tile[-4:] for tile in tiles(decode(kind(**vars(STACK))), 'data:2,model:2')]


def test_relative_positions_of_a_step_are_split_by_rows_and_heads():
  relative = RelativePositions(6, 8, bidirectional=False)
  stack = dataclasses.replace(STACK, attention=dataclasses.replace(STACK.attention, relative=relative))
  count = lambda stack: collections.Counter(tiles(decode(stack), 'data:2,model:2'))
  assert count(stack) - count(STACK) == {(2, 2, 1, 1): 2}  # BNTU, of two layers
