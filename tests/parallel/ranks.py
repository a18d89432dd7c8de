"""Processes that serve as ranks: started once for a test file, then given one function after another.

A server process imports torch once and forks the ranks. Groups of 2, 3, ... of them exist side by side, so one start serves
every number of ranks.
"""

import contextlib
import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta

CONTEXT = multiprocessing.get_context("forkserver")
LIMIT = 240.0
PRELOADED = [
    "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.fx.experimental.symbolic_shapes", "posenc.parallel",
    "posenc.nn.attention", "posenc.nn.context_parallel",
]  # fmt: skip
"""What ranks would otherwise load one by one."""


class Ranks:
    """`run(function, size, *arguments)` calls function(group, *arguments) on the first `size` ranks; returns their results."""

    def __init__(self, size, seconds=60.0):
        multiprocessing.set_forkserver_preload(PRELOADED)
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = CONTEXT.Pipe()
            file = os.path.join(self.folder.name, "rendezvous")
            process = CONTEXT.Process(target=_serve, args=(theirs, rank, size, file, seconds), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, function, size, *arguments, dies=()):
        """dies: ranks that end without an answer."""
        for pipe in self.pipes[:size]:
            pipe.send((function, size, arguments))
        results, errors = [], []
        for rank, pipe in enumerate(self.pipes[:size]):
            if rank in dies:
                continue
            if not pipe.poll(LIMIT):
                raise TimeoutError(f"rank {rank} did not answer within {LIMIT} s")
            kind, value = pipe.recv()
            (results if kind == "result" else errors).append(value)
        if errors:
            raise AssertionError("\n".join(errors))
        return results

    def close(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.folder.cleanup()


def _serve(pipe, rank, size, file, seconds):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
    )
    groups = {n: dist.new_group(list(range(n))) for n in range(1, size + 1)}
    while True:
        with contextlib.suppress(EOFError):
            function, count, arguments = pipe.recv()
            try:
                pipe.send(("result", function(groups[count], *arguments)))
            except Exception:
                pipe.send(("error", f"rank {rank}:\n{traceback.format_exc()}"))
            continue
        return
