"""Annotations of layers on a mesh: a program is traced, not compiled."""

from __future__ import annotations

import dataclasses

import pytest
import tensorflow as tf
from random_theta import theta_of

from lingvo_moe import xla_sharding
from lingvo_moe.core import prng
from lingvo_moe.layers.attention import Attention
from lingvo_moe.layers.ffn import FeedForward
from lingvo_moe.layers.incremental import Now
from lingvo_moe.layers.moe import MoE
from lingvo_moe.layers.stack import Stack
from lingvo_moe.ops import backend
from lingvo_moe.ops import xla

STACK = Stack(2, Attention(8, 2, 4), FeedForward(8, 12), MoE(8, 12, num_experts=4, num_groups=4), causal=True)


def tiles(function, mesh):
  """Tiles of every annotation in the program of a function, the bodies of loops included."""
  with xla_sharding.use(xla_sharding.Mesh.parse(mesh)), backend.use(xla.BACKEND):
    program = tf.function(function, autograph=False).get_concrete_function().graph.as_graph_def()
  nodes = [node for f in program.library.function for node in f.node_def] + list(program.node)
  found = [xla_sharding.OpSharding.FromString(n.attr['sharding'].s) for n in nodes if n.op == 'XlaSharding']
  return [
    tuple(sharding.tile_assignment_dimensions)[: -1 if sharding.replicate_on_last_tile_dim else None]
    for sharding in found
    if sharding.tile_assignment_dimensions
  ]


@pytest.mark.parametrize('scan', [False, True])
def test_activations_are_split_by_rows_or_groups_and_those_of_experts_by_experts(scan):
  stack = dataclasses.replace(STACK, scan=scan)
  theta = theta_of(stack)
  train = lambda: stack(theta, tf.ones([4, 6, 8]), tf.ones([4, 6], tf.int32), key=prng.key(0))[0]
  found = set(tiles(train, 'data:2,expert:2'))
  # BTM, GSM and GSE; BNTU and BNUK; EGCM that groups claim first; EGCM that experts do.
  assert found - {(2, 1, 1)} == {(4, 1, 1), (4, 1, 1, 1), (1, 4, 1, 1), (2, 2, 1, 1)}
  assert ((2, 1, 1) in found) == scan  # weights of experts, EMH, which a loop takes from a stack of them


@pytest.mark.parametrize('scan', [False, True])
def test_a_cache_is_split_by_rows_and_heads(scan):
  stack = dataclasses.replace(STACK, scan=scan)
  theta = theta_of(stack)

  def decode():
    now = Now(tf.constant(0), tf.constant(0), tf.ones([4, 1, 5]))
    return stack.extend(theta, tf.ones([4, 1, 8]), now, None, stack.empty_cache(4, 5))

  assert (2, 2, 1, 1) in [tile[-4:] for tile in tiles(decode, 'data:2,model:2')]  # of BNUK and LBNUK
