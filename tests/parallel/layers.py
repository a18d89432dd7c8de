"""What the ranks compute in test_layer.py."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import posenc
from posenc import UnsupportedPlan, parallel
from posenc.parallel.layout import BALANCES
from tests.parallel.cases import BATCH, D_MODEL, HEADS, SIZE, difference, local


def cut_and_put_back(group):
    for balance in BALANCES:
        cp = parallel.ContextParallel(group, balance=balance)
        for length in (cp.unit * 4, cp.unit * 4 - 1, 1):
            ids = torch.arange(BATCH * length).view(BATCH, length)
            documents = ids // 5
            part = parallel.split_sequence({"ids": ids, "labels": ids}, cp, documents=documents, fill={"labels": -100})
            slots = cp.slots(part.positions.shape[0])
            assert torch.equal(part.positions, slots) and part.length == length
            real = slots < length
            assert torch.equal(part.tensors["ids"][:, real], ids[:, slots[real]])
            assert (part.tensors["labels"][:, ~real] == -100).all()
            assert torch.equal(part.documents[:, real], documents[:, slots[real]])
            assert not (part.documents[:, ~real, None] == documents[:, None]).any()
            if length % cp.unit:
                assert torch.equal(part.key_mask, real.expand(BATCH, -1))
                with pytest.raises(ValueError, match="cannot be divided among 3 ranks"):
                    parallel.split_sequence(ids, cp, pad=False)
            else:
                assert part.key_mask is None
            back = parallel.unsplit_sequence(part.tensors["ids"], cp, length=length)
            assert torch.equal(back, ids)


def autocast(group):
    """bfloat16, also in the backward pass, where a ring makes tables again: as near to float64 as one process is."""
    cp = parallel.ContextParallel(group, strategy="ring", balance="zigzag")
    for name in ("transformer_xl", "t5", "deberta"):
        torch.manual_seed(3)
        exact = posenc.Attention(D_MODEL, HEADS, head_dim=SIZE, encoding=name, causal=True).double()
        x = torch.randn(BATCH, 4 * cp.unit, D_MODEL, dtype=torch.float64)
        weight = torch.randn_like(x)
        results = []
        for context in (None, cp):
            layer = copy.deepcopy(exact).float()
            layer.context_parallel = context
            own, own_weight = (x, weight) if context is None else (local(x, cp, 1), local(weight, cp, 1))
            with torch.autocast("cpu", torch.bfloat16):
                out = layer(own.float())
            (out.float() * own_weight.float()).sum().backward()
            if context is not None:
                parallel.reduce_gradients(layer, cp)
            results.append((out, [p.grad for p in layer.parameters()]))
        (exact(x) * weight).sum().backward()
        for p, one, two in zip(exact.parameters(), results[0][1], results[1][1], strict=True):
            if p.grad is not None:
                allowed = 3 * difference(one, p.grad) + 1e-2
                assert difference(two, p.grad) < allowed, (name, difference(two, p.grad), allowed)


def order_of_a_ring(group):
    """What happens in a forward pass on this rank, in order."""
    from posenc.parallel import collectives, ring

    events, plain = [], (ring.exchange, ring.run_block, collectives.Pending.wait)

    def noted(name, function):
        def call(*arguments):
            events.append(name)
            return function(*arguments)

        return call

    cp = parallel.ContextParallel(group, strategy="ring")
    q = torch.randn(1, 2, 4, 8)
    parallel.attend(q, q, q, context_parallel=cp)
    ring.exchange, ring.run_block = noted("send", plain[0]), noted("block", plain[1])
    collectives.Pending.wait = noted("wait", plain[2])
    try:
        parallel.attend(q, q, q, context_parallel=cp)
    finally:
        ring.exchange, ring.run_block, collectives.Pending.wait = plain
    return events[1:]  # the first wait is for the comparison of sizes


class Model(nn.Module):
    def __init__(self, cp=None, encoding="t5", layers=2):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(50, D_MODEL)
        self.layers = nn.ModuleList(
            posenc.Attention(D_MODEL, HEADS, head_dim=SIZE, encoding=encoding, causal=True, context_parallel=cp)
            for _ in range(layers)
        )
        self.head = nn.Linear(D_MODEL, 50)
        self.double()

    def forward(self, ids, **options):
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x, **options)
        return self.head(x)


def loss_of(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def batch_of(length):
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 50, (BATCH, length), generator=generator)
    return ids, ids.roll(-1, 1), (torch.arange(length) // 7).expand(BATCH, -1)


def train_packed(group):
    """Documents across ranks and a length that nobody can divide; learned positions restart in every document."""
    for balance in BALANCES:
        cp = parallel.ContextParallel(group, strategy="ring", balance=balance)
        ids, labels, documents = batch_of(31)
        torch.manual_seed(5)
        encoding = posenc.Learned(d_model=D_MODEL, max_length=40)
        whole = Model(None, encoding)
        part_model = copy.deepcopy(whole)
        for layer in part_model.layers:
            layer.context_parallel = cp
        exact = loss_of(whole(ids, documents=documents), labels)
        exact.backward()
        part = parallel.split_sequence({"ids": ids, "labels": labels}, cp, documents=documents, fill={"labels": -100})
        logits = part_model(part.tensors["ids"], documents=part.documents, key_mask=part.key_mask)
        loss = loss_of(logits, part.tensors["labels"])
        loss.backward()
        parallel.reduce_gradients(part_model, cp)
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        assert difference(total, exact) < 1e-10
        for a, b in zip(part_model.parameters(), whole.parameters(), strict=True):
            assert difference(a.grad, b.grad) < 1e-10


def shard_heads(layer, mesh):
    plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
    parallelize_module(layer, mesh, {**plan, "o_proj": RowwiseParallel()})


def tensor_parallel(group, names):
    """Heads over two ranks, the sequence over two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "cp"))
    for name in names:
        for strategy in ("ring", "ulysses", "gather"):
            torch.manual_seed(3)
            whole = posenc.Attention(D_MODEL, HEADS, head_dim=SIZE, encoding=name, causal=True).double()
            for p in whole.encoding.parameters():
                nn.init.normal_(p)
            cp = parallel.ContextParallel(mesh["cp"], strategy=strategy, balance="zigzag")
            part = copy.deepcopy(whole)
            part.context_parallel = cp
            shard_heads(part, mesh["tp"])
            x = torch.randn(BATCH, 4 * cp.unit, D_MODEL, dtype=torch.float64)
            weight = torch.randn_like(x)
            own, x = local(x, cp, 1).clone().requires_grad_(), x.requires_grad_()
            exact = whole(x)
            (exact * weight).sum().backward()
            found = part(own)
            (found * local(weight, cp, 1)).sum().backward()
            assert difference(found, local(exact, cp, 1)) < 1e-10, (name, strategy)
            assert difference(own.grad, local(x.grad, cp, 1)) < 1e-10, (name, strategy)
            parallel.reduce_gradients(part.encoding, cp)
            for (key, a), b in zip(part.encoding.named_parameters(), whole.encoding.parameters(), strict=True):
                assert difference(a.grad, b.grad) < 1e-10, (name, strategy, key)
            weights = part.q_proj.weight.grad.to_local()
            dist.all_reduce(weights, group=mesh["cp"].get_group())
            assert difference(weights, whole.q_proj.weight.grad.chunk(2)[mesh["tp"].get_local_rank()]) < 1e-10
    # without context parallelism, too
    part = copy.deepcopy(whole)
    shard_heads(part, mesh["tp"])
    y = part(x.detach())
    assert difference(y, exact) < 1e-10
    (y * weight).sum().backward()
    for a, b in zip(part.encoding.parameters(), whole.encoding.parameters(), strict=True):
        assert difference(a.grad, b.grad) < 1e-10


def fsdp_and_tensor_parallel(group):
    """FSDP2 over the ranks that share the sequence, heads over the others; one step of an optimiser."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    cp = parallel.ContextParallel(mesh["cp"], strategy="ring", balance="zigzag")
    ids, labels, _ = batch_of(4 * cp.unit)
    whole = Model(None)
    model = copy.deepcopy(whole)
    for layer in model.layers:
        layer.context_parallel = cp
        shard_heads(layer, mesh["tp"])
        fully_shard(layer, mesh=mesh["cp"])
    fully_shard(model, mesh=mesh["cp"])
    part = parallel.split_sequence({"ids": ids, "labels": labels}, cp)
    for step in range(2):
        for one, given in ((whole, (ids, labels)), (model, (part.tensors["ids"], part.tensors["labels"]))):
            loss = loss_of(one(given[0]), given[1]) / labels.numel()
            # FSDP averages over its ranks, each of which has a part of the sum
            (loss * (1 if one is whole else cp.size)).backward()
            torch.optim.SGD(one.parameters(), lr=0.5).step()
            one.zero_grad()
        for (name, a), b in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert difference(a.full_tensor(), b) < 1e-10, (step, name)


def save_checkpoint(group, folder):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    model = Model(parallel.ContextParallel(mesh["cp"], strategy="ring"))
    fully_shard(model, mesh=mesh)
    checkpoint.save(model.state_dict(), checkpoint_id=folder)


def load_checkpoint(group, folder):
    """The weights of four ranks on fewer, and what they compute."""
    cp = parallel.ContextParallel(group, strategy="ring")
    model = Model(cp)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    state = model.state_dict()
    checkpoint.load(state, checkpoint_id=folder, process_group=group)
    model.load_state_dict(state)
    ids, _, _ = batch_of(16)
    part = parallel.split_sequence(ids, cp)
    out = parallel.unsplit_sequence(model(part.tensors["x"]), cp)
    assert difference(out, Model()(ids)) < 1e-10
    return model.head.weight.detach()


def refusals(group):
    """Errors that every rank raises before it sends anything, so that the next call works."""
    cp = parallel.ContextParallel(group, strategy="ulysses")
    x = torch.randn(1, 4, D_MODEL)
    layer = posenc.Attention(D_MODEL, HEADS, head_dim=SIZE, encoding="t5", causal=True, context_parallel=cp)
    with pytest.raises(ValueError, match="cache cannot be combined with context_parallel"):
        layer(x, cache=posenc.KVCache())
    with pytest.raises(ValueError, match="memory cannot be combined"):
        layer(x, memory=x)
    with pytest.raises(TypeError, match="cannot be pickled"):
        copy.copy(cp).__reduce__()
    q = torch.randn(1, 3, 4, 8)
    with pytest.raises(UnsupportedPlan, match="3 query heads cannot be divided among 2 ranks; use strategy='ring'"):
        parallel.attend(q, q, q, context_parallel=cp)
    with pytest.raises(TypeError, match="got a Plan"):
        parallel.attend(q, q, q, posenc.Plan(posenc.Positions(4)), context_parallel=cp)
    with pytest.raises(ValueError, match="strategy='ring' was given together with"):
        parallel.attend(q, q, q, context_parallel=cp, strategy="ring")
    with pytest.raises(ValueError, match=r"mask must broadcast to \[B, H, L/N, L\]"):
        parallel.attend(q, q, q, context_parallel=cp, mask=torch.zeros(4, 4))
    with pytest.raises(ValueError, match="for this rank's tokens"):
        parallel.attend(q, q, q, context_parallel=cp, positions=torch.arange(8))
    zigzag = parallel.ContextParallel(group, strategy="ring", balance="zigzag")
    odd = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match="needs an even number on every rank"):
        parallel.attend(odd, odd, odd, context_parallel=zigzag)
    weight = torch.ones((), requires_grad=True)
    pair = lambda positions: posenc.Plan(positions, pair=lambda a, b: weight * (b - a[:, None]).float())  # noqa: E731
    with pytest.raises(UnsupportedPlan, match="cannot reach the gradients of tensors that `pair` reads"):
        parallel.attend(q, q, q, pair, context_parallel=group, strategy="ring")
    with pytest.raises(parallel.ParallelError, match="different numbers of queries: rank 0: 4, rank 1: 5"):
        y = torch.randn(1, 2, 4 + cp.rank, 8)
        parallel.attend(y, y, y, context_parallel=cp)
    with pytest.raises(parallel.ParallelError, match="whether there is key_mask: rank 0: 0, rank 1: 1"):
        y = torch.randn(1, 2, 4, 8)
        masks = {"key_mask": torch.ones(1, 4, dtype=torch.bool)} if cp.rank else {}
        parallel.attend(y, y, y, context_parallel=cp, **masks)
    moving = posenc.AxialRoPE(head_dim=8, convention="dinov3", grid=(2, 4), shift=0.1)
    with pytest.raises(UnsupportedPlan, match="would draw different coordinates on every rank"):
        parallel.attend(y, y, y, moving, context_parallel=cp, positions=torch.zeros(1, 4, 2, dtype=torch.int64))
    for name, value in (("strategy", "star"), ("balance", "even"), ("timeout", 0)):
        with pytest.raises(ValueError, match=f"{name}="):
            parallel.ContextParallel(group, **{name: value})
    with pytest.raises(ValueError, match="needs context_parallel"):
        posenc.Attention(D_MODEL, HEADS, head_dim=SIZE, strategy="ring")
    assert torch.isfinite(layer(x)).all()
