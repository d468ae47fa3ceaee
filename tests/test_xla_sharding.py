"""Sharding annotations: the parts on each device, worked out by hand, and the programs that XLA makes of them."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe import xla_sharding
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.mesh import ACTIVATIONS, WEIGHTS, WEIGHTS_SPLIT, Mesh
from lingvo_moe.xla_sharding import shard


def tiles(sharding):
  """The device numbers of a sharding's tiles, as XLA reads its iota form."""
  devices = np.arange(np.prod(sharding.iota_reshape_dims)).reshape(sharding.iota_reshape_dims)
  return devices.transpose(sharding.iota_transpose_perm).reshape(sharding.tile_assignment_dimensions)


def annotation(function, shape, mesh):
  """The OpSharding that a function of a tensor puts on it."""
  with xla_sharding.use(mesh):
    graph = tf.function(function, autograph=False).get_concrete_function(tf.TensorSpec(shape)).graph
  (op,) = (op for op in graph.get_operations() if op.type == 'XlaSharding')
  assert op.get_attr('sharding') == op.get_attr('_XlaSharding')
  return xla_sharding.OpSharding.FromString(op.get_attr('sharding'))


def test_a_mesh_is_read_and_written():
  mesh = Mesh.parse('data:2,expert:4')
  assert mesh.axes == (('data', 2), ('expert', 4)) and mesh.num_devices == 8 and str(mesh) == 'data:2,expert:4'
  assert Mesh.parse('').num_devices == 1 and str(Mesh.parse('')) == 'one device'


@pytest.mark.parametrize(
  'text, message',
  [
    ('experts:2', "no axis 'experts'; closest: expert"),
    ('expert', "written 'data:2,expert:4'"),
    ('expert:x', "written 'data:2,expert:4'"),
    ('expert:0', 'at least 1 device; saw expert:0'),
    ('data:2,data:2', 'names an axis once'),
    (' ', "written 'data:2,expert:4', sizes from 1 to 65,536; saw ' '"),
    (',', "written 'data:2,expert:4', .*; saw ','"),
    ('data:2,', "written 'data:2,expert:4', .*; saw 'data:2,'"),
    ('data:' + '9' * 5000, r"written 'data:2,expert:4', .*; saw 'data:9{74}\.\.\.:"),
    ('expert:99999999999999999999', "saw 'expert:99999999999999999999'"),
    ('expert:99999999', "saw 'expert:99999999'"),
    ('data:999,expert:999', "a mesh has at most 65,536 devices; saw 'data:999,expert:999'"),
  ],
)
def test_a_bad_mesh_is_told(text, message):
  with pytest.raises(UserError, match=message):
    Mesh.parse(text)


@pytest.mark.parametrize(
  'mesh, dims, spec',
  [
    ('data:2,expert:2', 'GSM', (('data', 'expert'), (), ())),
    ('data:2,expert:2', 'EGCM', (('expert',), ('data',), (), ())),
    ('data:2,expert:2', 'GECM', (('data', 'expert'), (), (), ())),
    ('expert:4', 'EGCM', (('expert',), (), (), ())),
    ('data:4', 'EGCM', ((), ('data',), (), ())),
    ('expert:2,model:2', 'EGCH', (('expert',), (), (), ('model',))),
    ('data:2,expert:2,model:2', 'BNTU', (('data', 'expert'), ('model',), (), ())),
  ],
)
def test_letters_claim_axes_from_left_to_right(mesh, dims, spec):
  assert Mesh.parse(mesh).spec(dims, ACTIVATIONS) == spec


def test_hidden_features_of_experts_alone_may_be_split():
  mesh = Mesh.parse('data:2,expert:2,hidden:2')
  assert mesh.spec('GSM', ACTIVATIONS) == (('data', 'hidden', 'expert'), (), ())
  assert mesh.spec('GSH', ACTIVATIONS) == (('data', 'hidden', 'expert'), (), ())
  assert mesh.spec('EGCM', ACTIVATIONS, 'E') == (('expert',), ('data', 'hidden'), (), ())
  assert mesh.spec('EGCH', ACTIVATIONS) == (('expert',), ('data',), (), ('hidden',))
  assert mesh.spec('MH', WEIGHTS) == ((), ()) and mesh.spec('EHM', WEIGHTS) == (('expert',), ('hidden',), ())
  assert Mesh.parse('model:2,hidden:2').spec('EMH', WEIGHTS) == ((), (), ('model', 'hidden'))


def test_weights_may_be_stored_as_on_another_mesh():
  mesh = Mesh.parse('data:4/data:2,expert:2', split_dense=True)
  assert str(mesh) == 'data:4/data:2,expert:2' and mesh.stored == Mesh.parse('data:2,expert:2', split_dense=True)
  assert mesh.spec('EMH', WEIGHTS) == ((), (), ()) and mesh.stored.spec('EMH', WEIGHTS) == (('expert',), (), ())
  assert Mesh.parse('data:4').stored == Mesh.parse('data:4')
  with pytest.raises(UserError, match='saw data:4/expert:2 of 4 and 2 devices: use meshes of one size'):
    Mesh.parse('data:4/expert:2')
  with pytest.raises(UserError, match="written 'data:2,expert:4'.*; saw '4'"):
    Mesh.parse('expert:4/4')
  with pytest.raises(UserError, match="one '/'.*; saw 'data:4/expert:4/data:4'"):
    Mesh.parse('data:4/expert:4/data:4')


def test_a_weight_has_the_sharding_of_the_mesh_that_stores():
  mesh = Mesh.parse('data:4/expert:4')
  sharding = mesh.stored_sharding((8, 16, 5), 'EMH')
  assert sharding == (Mesh.parse('expert:4'), (('expert',), (), ())) and sharding.parts == 4
  assert sharding.op_sharding == sharding.mesh.op_sharding(sharding.spec)
  with pytest.raises(UserError, match='^wi: axis E .* has size 6, .*: use a multiple of 4, or --mesh=data:4$'):
    mesh.stored_sharding((6, 16, 5), 'EMH', 'wi')


def test_letters_that_come_first_claim_first():
  assert Mesh.parse('data:2,expert:2').spec('EGCM', ACTIVATIONS, first='G') == ((), ('data', 'expert'), (), ())


def test_dense_weights_are_whole_unless_asked_for():
  mesh = Mesh.parse('data:2,expert:2,model:2')
  assert mesh.spec('MH', WEIGHTS) == ((), ('model',))
  assert mesh.spec('EMH', WEIGHTS) == (('expert',), (), ('model',))
  assert mesh.spec('MH', WEIGHTS_SPLIT) == (('data', 'expert'), ('model',))
  assert mesh.spec('EMH', WEIGHTS_SPLIT) == (('expert',), ('data',), ('model',))


def test_a_dense_weight_is_split_in_as_many_parts_as_have_8_rows():
  mesh = Mesh.parse('data:2,expert:8', split_dense=True)
  assert mesh.stored_sharding((128, 5), 'MH').spec == (('data', 'expert'), ())
  assert mesh.stored_sharding((32, 5), 'MH').spec == (('data', 'expert/2'), ())  # parts of 8 rows
  assert mesh.stored_sharding((8, 16, 5), 'EMH').spec == (('expert',), ('data',), ())
  assert mesh.stored_sharding((8, 15, 7), 'EMH').spec == (('expert',), (), ())
  assert mesh.stored_sharding((36, 5), 'MH').spec == ((), ())  # 4 parts of 9 rows are no tiles
  with pytest.raises(UserError, match=r'^wi: axis E \(experts\) has size 4'):
    mesh.stored_sharding((4, 6, 5), 'EMH', 'wi')


def test_an_update_may_be_split_where_weights_are_copied():
  mesh = Mesh.parse('data:2,expert:8', split_update=True)
  assert mesh.stored_sharding((128, 5), 'MH').spec == ((), ())
  assert mesh.stored_sharding((128, 5), 'MH', update=True).spec == (('data', 'expert'), ())
  assert mesh.stored_sharding((8, 16, 5), 'EMH', update=True).spec == (('expert',), ('data',), ())
  stages = Mesh.parse('stage:2,data:2', split_update=True)
  assert stages.stored_sharding((4, 16, 5), 'LMH', update=True).spec == (('stage',), ('data',), ())
  whole = Mesh.parse('data:2,expert:8')
  assert whole.stored_sharding((128, 5), 'MH', update=True).spec == ((), ())


def test_neighbours_along_an_axis_hold_the_parts_and_the_others_copies():
  mesh = Mesh.parse('expert:4', split_dense=True)
  spec = mesh.stored_sharding((16, 5), 'MH').spec
  assert spec == (('expert/2',), ()) and mesh.factors(spec) == (('expert', 2), ('expert/2', 2))
  partial = mesh.op_sharding(spec)
  assert partial.replicate_on_last_tile_dim
  np.testing.assert_array_equal(tiles(partial)[:, 0], [[0, 2], [1, 3]])


def test_tiles_by_hand():
  mesh = Mesh.parse('data:2,expert:2')  # devices 0 1 / 2 3
  of = lambda dims: mesh.op_sharding(mesh.spec(dims, ACTIVATIONS))
  np.testing.assert_array_equal(tiles(of('GM')).reshape(4), [0, 1, 2, 3])
  np.testing.assert_array_equal(tiles(of('EG')), [[0, 2], [1, 3]])  # tile (e, g) is at data=g, expert=e
  partial = of('EM')
  assert partial.replicate_on_last_tile_dim
  np.testing.assert_array_equal(tiles(partial), [[[0, 2]], [[1, 3]]])  # each expert's tile on both data devices
  assert of('MH').type == xla_sharding.OpSharding.REPLICATED


def test_the_size_of_an_annotation_does_not_depend_on_the_devices():
  size = lambda n: Mesh.parse(f'data:{n},expert:{n}').op_sharding((('expert',), ('data',))).ByteSize()
  assert size(64) - size(2) < 10


def test_the_order_of_devices_follows_the_topology():
  mesh = Mesh((('data', 2), ('expert', 4)), topology=(2, 2, 2), placement=((1,), (0, 2)))
  np.testing.assert_array_equal(mesh.device_ids(), [[0, 1, 4, 5], [2, 3, 6, 7]])
  np.testing.assert_array_equal(Mesh.parse('data:2,expert:2').device_ids(), [[0, 1], [2, 3]])
  with pytest.raises(UserError, match='must span each axis of the topology'):
    Mesh((('data', 2), ('expert', 4)), topology=(2, 2, 2), placement=((1,), (0, 1)))


def test_a_reshard_moves_one_mesh_axis_at_a_time():
  def tiles(source, target):
    with xla_sharding.use(Mesh.parse('data:2,node:3,expert:5')):
      reshard = tf.function(lambda x_EGCM: xla_sharding.reshard(x_EGCM, 'EGCM', source, target), autograph=False)
      graph = reshard.get_concrete_function(tf.TensorSpec([30, 30, 2, 4])).graph
    ops = [op for op in graph.get_operations() if op.type == 'XlaSharding']
    return [list(xla_sharding.OpSharding.FromString(op.get_attr('sharding')).tile_assignment_dimensions) for op in ops]

  # From groups over all 30 devices: first expert:5, then node:3. And back in the reverse order.
  assert tiles('G', 'E') == [[5, 6, 1, 1], [15, 2, 1, 1]]
  assert tiles('E', 'G') == [[5, 6, 1, 1], [1, 30, 1, 1]]


def test_a_size_that_cannot_be_split_is_told_with_a_mesh_that_would_do():
  message = (
    r"axis E \(experts\) has size 6, .* 4 devices of mesh axis 'expert': use a multiple of 4, or --mesh=expert:2$"
  )
  with pytest.raises(UserError, match=message):
    annotation(lambda x: shard(x, 'EM'), [6, 3], Mesh.parse('expert:4'))
  with pytest.raises(UserError, match=r"'data' x 'expert': use a multiple of 4, or --mesh=data:2,expert:1$"):
    annotation(lambda x: shard(x, 'GM'), [2, 3], Mesh.parse('data:2,expert:2'))


@pytest.mark.parametrize('mesh', [None, Mesh.parse('expert:1'), Mesh.parse('')])
def test_on_one_device_every_call_returns_its_argument(mesh):
  x = tf.zeros([2, 3])
  with xla_sharding.use(mesh):
    assert shard(x, 'EM') is x
    assert shard(x, np.zeros([1, 1], int)) is x
    assert xla_sharding.split(x, 0, 2) is x
    assert xla_sharding.replicate(x) is x
    assert xla_sharding.store(x, 'EM') is x and xla_sharding.gather(x, 'EM') is x
    assert xla_sharding.auto_to_manual(x, 'EM') is x and xla_sharding.manual_to_auto(x, 'EM') is x


FOUR = Mesh.parse('expert:4')


def test_replicate_and_split():
  assert annotation(xla_sharding.replicate, [4, 3], FOUR).type == xla_sharding.OpSharding.REPLICATED
  whole = annotation(lambda x: xla_sharding.split(x, 1, 4), [3, 8], FOUR)
  np.testing.assert_array_equal(tiles(whole), [[0, 1, 2, 3]])
  half = annotation(lambda x: xla_sharding.split(x, 0, 2), [4, 3], FOUR)
  assert half.replicate_on_last_tile_dim
  np.testing.assert_array_equal(tiles(half), [[[0, 1]], [[2, 3]]])
  with pytest.raises(UserError, match='3 partitions on 4 devices'):
    annotation(lambda x: xla_sharding.split(x, 0, 3), [6, 3], FOUR)


def test_a_device_assignment_takes_the_iota_form_where_it_can():
  transposed = annotation(lambda x: shard(x, np.array([[0, 2], [1, 3]])), [4, 4], FOUR)
  assert not transposed.tile_assignment_devices
  np.testing.assert_array_equal(tiles(transposed), [[0, 2], [1, 3]])
  odd = annotation(lambda x: shard(x, np.array([[0, 3], [2, 1]])), [4, 4], FOUR)
  assert list(odd.tile_assignment_devices) == [0, 3, 2, 1]
  partial = annotation(lambda x: shard(x, np.array([[[0, 1]], [[2, 3]]])), [4, 4], FOUR)
  assert partial.replicate_on_last_tile_dim
  np.testing.assert_array_equal(tiles(partial), [[[0, 1]], [[2, 3]]])
  with pytest.raises(UserError, match='names the devices 0 to 3 once each'):
    annotation(lambda x: shard(x, np.array([[0, 0], [1, 2]])), [4, 4], FOUR)
  with pytest.raises(UserError, match='has the rank of its tensor'):
    annotation(lambda x: shard(x, np.arange(4)), [4, 4], FOUR)


def test_a_device_assignment_names_every_device_of_the_mesh():
  message = (
    r'every device of the mesh once; saw 2 for the 4 of expert:4: .* add a last axis along which tiles are copied'
  )
  with pytest.raises(UserError, match=message):
    annotation(lambda x: shard(x, np.array([[0], [1]])), [4, 4], FOUR)
  with pytest.raises(UserError, match='saw 8 for the 4 of expert:4'):
    annotation(lambda x: shard(x, np.arange(8).reshape(4, 2)), [4, 4], FOUR)


def test_the_gradient_is_annotated_alike():
  def gradient(x):
    with tf.GradientTape() as tape:
      tape.watch(x)
      y = tf.square(shard(x, 'EM'))
    return tape.gradient(y, x)

  with xla_sharding.use(FOUR):
    graph = tf.function(gradient, autograph=False).get_concrete_function(tf.TensorSpec([4, 3])).graph
  shardings = [op.get_attr('sharding') for op in graph.get_operations() if op.type == 'XlaSharding']
  assert len(shardings) == 2 and len(set(shardings)) == 1


def test_a_region_on_a_mesh_that_splits_nothing_in_it_is_whole():
  shapes = []

  def double(x):
    shapes.append(x.shape.as_list())
    return 2 * shard(x, 'GH')  # means nothing in here

  with xla_sharding.use(Mesh.parse('model:4')):
    function = lambda x: xla_sharding.manually(double, (x, 'GM'), returns='GM')
    graph = tf.function(function, autograph=False).get_concrete_function(tf.TensorSpec([8, 3])).graph
  shardings = [op.get_attr('sharding') for op in graph.get_operations() if op.type == 'XlaSharding']
  assert [xla_sharding.OpSharding.FromString(s).type for s in shardings] == [xla_sharding.OpSharding.REPLICATED] * 2
  assert shapes == [[8, 3]] and not any(op.type.startswith('XlaSpmd') for op in graph.get_operations())


def test_a_manual_region_sees_parts():
  shapes = []

  def double(x):
    shapes.append(x.shape.as_list())
    return 2 * shard(x, 'GM')  # means nothing in here

  def function(x):
    return xla_sharding.manually(double, (x, 'GM'), returns='GM')

  with xla_sharding.use(FOUR):
    concrete = tf.function(function, autograph=False).get_concrete_function(tf.TensorSpec([8, 3]))
  assert shapes == [[2, 3]] and concrete.outputs[0].shape == [8, 3]
  types = [op.type for op in concrete.graph.get_operations()]
  assert types.count('XlaSpmdFullToShardShape') == types.count('XlaSpmdShardToFullShape') == 1
  np.testing.assert_array_equal(
    xla_sharding.manually(double, (tf.ones([8, 3]), 'GM'), returns='GM'), 2 * np.ones([8, 3])
  )


def test_the_gather_of_section_3_2_in_the_papers_names():
  x_GSM, s_EGC = tf.random.stateless_normal([4, 6, 3], [1, 2]), tf.constant([[[5, 0], [1, 1], [2, 3], [4, 0]]] * 2)

  def gather(x_GSM, s_EGC):
    """data = x at (g, s_indices), by a gather on each device's own groups."""
    part_GSM = xla_sharding.auto_to_manual_spmd_partition(x_GSM, 'GSM')
    part_EGC = xla_sharding.auto_to_manual_spmd_partition(s_EGC, 'EGC', first='G')
    parts.append((part_GSM.shape.as_list(), part_EGC.shape.as_list()))
    g_EGC = tf.broadcast_to(tf.range(part_EGC.shape[1])[:, tf.newaxis], part_EGC.shape)
    part_EGCM = tf.gather_nd(part_GSM, tf.stack([g_EGC, part_EGC], axis=-1))
    return xla_sharding.manual_to_auto_spmd_partition(part_EGCM, 'EGCM', first='G')

  parts = []
  want_EGCM = gather(x_GSM, s_EGC)
  for e, g, c in np.ndindex(2, 4, 2):
    np.testing.assert_array_equal(want_EGCM[e, g, c], x_GSM[g, s_EGC[e, g, c]])
  with xla_sharding.use(FOUR):
    shape = tf.function(gather, autograph=False).get_concrete_function(x_GSM, s_EGC).outputs[0].shape
  assert parts == [([4, 6, 3], [2, 4, 2]), ([1, 6, 3], [2, 1, 2])] and shape == [2, 4, 2, 3]
