"""posenc.parallel: attention over a sequence that several processes share, for every encoding.

posenc.parallel.attend(q, k, v, encoding, context_parallel=mesh["cp"])      each rank's own tokens, exact distances
posenc.Attention(..., context_parallel=mesh["cp"], strategy="ring")         the same as an option of the layer
posenc.parallel.split_sequence(batch, mesh["cp"])                           cut a batch; unsplit_sequence puts it back

layout       which tokens a rank holds                 context       ranks, strategy, balance, time limit
ulysses      all-to-all over heads                     collectives   every message between ranks, counted
gather       keys and values gathered                  blocks        one segment of queries against one of keys
ring         keys travel, results are merged           plan_tensors  a plan's tensors: cut, sent or kept
"""

from .batches import Split as Split
from .batches import reduce_gradients as reduce_gradients
from .batches import split_sequence as split_sequence
from .batches import unsplit_sequence as unsplit_sequence
from .collectives import count_traffic as count_traffic
from .context import ContextParallel as ContextParallel
from .context import ParallelError as ParallelError
from .functional import attend as attend
from .tensor import split_heads as split_heads
