"""What the ranks compute: one process's attention over the whole sequence, and their part of the parallel one."""

import torch

import posenc
from posenc import parallel
from posenc.parallel.layout import take_order

D_MODEL, HEADS, SIZE, BATCH = 24, 12, 2 * 2, 2
ENCODINGS = {
    "none": ("none", {}),
    "rope": ("rope", {}),
    "xpos": ("xpos", {}),
    "alibi": ("alibi", {"learnable": True}),
    "t5": ("t5", {"buckets": 8, "max_distance": 9, "causal": False}),
    "clipped": ("clipped", {"max_distance": 3, "std": 1.0}),
    "shaw": ("shaw", {"max_distance": 3, "keys": True, "values": True, "std": 1.0}),
    "shaw per head": ("shaw", {"left": 2, "right": 4, "per_head": True, "values": True, "outside": "zero", "std": 1.0}),
    "deberta": ("deberta", {"max_distance": 4, "std": 1.0}),
    "deberta paper": ("deberta", {"max_distance": 9, "buckets": 4, "sign": "paper", "normalise": True, "std": 1.0}),
    "transformer_xl": ("transformer_xl", {"std": 1.0}),
    "transformer_xl clamped": ("transformer_xl", {"std": 1.0, "clamp_length": 5, "causal": True}),
    "xlnet": ("xlnet", {"std": 1.0}),
}
CAUSAL = {"xpos", "transformer_xl clamped"}
MASKS = (
    "open",
    "short window",
    "causal",
    "window",
    "causal window",
    "padding",
    "documents",
    "bool mask",
    "float mask",
    "all",
)


def make_encoding(name, dtype=torch.float64):
    kind, options = ENCODINGS[name]
    return posenc.create(kind, d_model=D_MODEL, heads=HEADS, head_dim=SIZE, **options).to(dtype)


def make_masks(kind, length, generator):
    """Masks of the whole sequence, as `attend` takes them."""
    masks = {}
    if kind in ("causal", "causal window", "short window", "all"):
        masks["causal"] = True
    if kind == "short window":
        masks["window"] = (3, 0)
    if kind in ("window", "causal window", "all"):
        masks["window"] = (5, 3) if kind == "window" else (length // 2, None) if kind == "all" else 4
    if kind in ("padding", "all"):
        key_mask = torch.ones(BATCH, length, dtype=torch.bool)
        key_mask[0, : length // 3] = False
        key_mask[1, -2:] = False
        masks["key_mask"] = key_mask
    if kind in ("documents", "all"):
        starts = torch.rand(BATCH, length, generator=generator) < 0.15
        masks["documents"] = starts.cumsum(-1)
    if kind == "bool mask":
        masks["mask"] = torch.rand(BATCH, 1, length, length, generator=generator) < 0.7
    if kind in ("float mask", "all"):
        masks["mask"] = torch.randn(1, HEADS, length, length, generator=generator, dtype=torch.float64)
    return masks


def local(x, cp, dim):
    """This rank's tokens of a tensor."""
    return take_order(x, cp.size, cp.balance, dim).chunk(cp.size, dim)[cp.rank]


def local_masks(masks, cp):
    found = dict(masks)
    for name in ("key_mask", "documents"):
        if name in found:
            found[name] = local(found[name], cp, 1)
    if "mask" in found and found["mask"].shape[-2] > 1:
        found["mask"] = local(found["mask"], cp, 2)
    return found


def compare(group, encoding, strategy, balance, mask, options):
    """The largest difference between one process's results and this rank's; dtype, lengths, ... in `options`."""
    dtype = options.get("dtype", torch.float64)
    cp = parallel.ContextParallel(group, strategy=strategy, balance=balance, timeout=30.0)
    length = options.get("length", 4 * cp.unit)
    kv_heads = options.get("kv_heads", HEADS)
    engine = options.get("engine", "auto")
    generator = torch.Generator().manual_seed(options.get("seed", 0))
    torch.manual_seed(7)
    module = None if encoding is None else make_encoding(encoding, dtype)
    masks = make_masks(mask, length, generator)
    if encoding in CAUSAL:
        masks["causal"] = True
    if "mask" in masks and masks["mask"].is_floating_point():
        masks["mask"] = masks["mask"].to(dtype)
        masks["mask"].requires_grad_()
    shape = (BATCH, HEADS, length, SIZE)
    q = torch.randn(shape, generator=generator, dtype=dtype)
    k, v = (torch.randn(BATCH, kv_heads, length, SIZE, generator=generator, dtype=dtype) for _ in range(2))
    w_out = torch.randn(shape, generator=generator, dtype=dtype)
    w_lse = torch.randn(shape[:3], generator=generator, dtype=dtype)
    positions = make_positions(options.get("positions"), length, generator)

    # one process, the reference formula
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    parameters = [] if module is None else [p for p in module.parameters() if p.requires_grad]
    more = [masks["mask"]] if "mask" in masks and masks["mask"].requires_grad else []
    all_positions = posenc.Positions(length if positions is None else positions)
    plan = None if module is None else module.plan(all_positions)
    out, lse = posenc.attend(*inputs, plan, engine=options.get("oracle", "reference"), return_lse=True, **masks)
    seen = lse > float("-inf")
    loss = (out * w_out).sum() + (lse.masked_fill(~seen, 0.0) * w_lse).sum()
    exact = torch.autograd.grad(loss, [*inputs, *parameters, *more], allow_unused=True)

    # this rank's part
    own = [local(x, cp, 2).clone().requires_grad_() for x in (q, k, v)]
    own_masks = local_masks(masks, cp)
    if more:
        own_masks["mask"] = own_masks["mask"].detach().clone().requires_grad_()
    found = parallel.attend(
        *own,
        module,
        context_parallel=cp,
        engine=engine,
        return_lse=True,
        positions=None
        if positions is None
        else local(positions, cp, positions.dim() - 1 if positions.dim() < 3 else 1),
        **own_masks,
    )
    own_seen = found[1] > float("-inf")
    loss = (found[0] * local(w_out, cp, 2)).sum()
    loss = loss + (found[1].masked_fill(~own_seen, 0.0) * local(w_lse, cp, 2)).sum()
    more = [own_masks["mask"]] if more else []
    grads = torch.autograd.grad(loss, [*own, *parameters, *more], allow_unused=True)

    assert torch.equal(own_seen, local(seen, cp, 2)), "other queries are fully masked"
    pairs = [(found[0], local(out, cp, 2)), (found[1][own_seen], local(lse, cp, 2)[own_seen])]
    pairs += [(a, local(b, cp, 2)) for a, b in zip(grads[:3], exact[:3], strict=True)]
    for a, b in zip(grads[3:], exact[3:], strict=True):
        if b is None:
            assert a is None or not a.any()
            continue
        pairs.append((a, local(b, cp, 2) if more and b is exact[-1] else b))
    return [difference(a, b) for a, b in pairs]


def difference(a, b):
    """Relative to the largest number of a tensor, where that is above 1."""
    return float(((a - b).abs().max() / b.abs().max().clamp(min=1.0)).detach()) if a.numel() else 0.0


def make_positions(kind, length, generator):
    if kind is None:
        return None
    if kind == "jump":
        return torch.randint(0, 3 * length, (BATCH, length), generator=generator).sort(-1).values
    return torch.arange(length) + 5


def compare_all(group, cases, tolerance):
    """Every case; those that fail, with their differences."""
    failed = []
    for case in cases:
        try:
            errors = compare(group, *case)
        except Exception as error:
            raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
        if not max(errors) <= tolerance:
            failed.append((case, errors))
    assert not failed, "\n".join(f"{case}: {errors}" for case, errors in failed)
    return len(cases)


LAYERS = {
    # name: (encoding, options of the encoding, options of the layer, what the forward gets)
    "t5": ("t5", {"causal": True}, {"causal": True}, ()),
    "t5 padded": ("t5", {}, {}, ("key_mask",)),
    "rope packed": ("rope", {}, {"causal": True, "kv_heads": 4}, ("documents",)),
    "rope positions": ("rope", {}, {"causal": True}, ("positions",)),
    "rope dynamic": ("rope", {"scaling": "dynamic"}, {"causal": True}, ()),
    "rope dynamic packed": ("rope", {"scaling": "dynamic"}, {"causal": True}, ("documents",)),
    "rope dynamic padded": ("rope", {"scaling": "dynamic"}, {}, ("key_mask",)),
    "learned packed": ("learned", {"max_length": 64}, {"causal": True}, ("documents",)),
    "sinusoidal padded": ("sinusoidal", {}, {}, ("key_mask",)),
    "relative_logits": ("relative_logits", {"max_distance": 6, "d_rel": 3, "std": 1.0}, {"causal": True}, ()),
    "relative_logits tempered": (
        "relative_logits", {"max_distance": 6, "d_rel": 3, "std": 1.0, "temper": (0.5, 4.0)}, {"causal": True}, (),
    ),
    "deberta shared": ("deberta", {"projections": "shared", "max_distance": 4, "std": 1.0}, {"bias": True}, ("key_mask",)),
    "transformer_xl": ("transformer_xl", {"std": 1.0}, {"window": 6}, ()),
    "xlnet segments": ("xlnet", {"std": 1.0}, {}, ("segments",)),
    "mrope": ("mrope", {"sections": (1, 1)}, {"causal": True}, ("axes",)),
    "randomized": ("rope", {"randomized": 100}, {"causal": True}, ()),
    "randomized shaw": ("shaw", {"randomized": 100, "max_distance": 9, "std": 1.0}, {}, ()),
    "alibi cross": ("alibi", {"learnable": True}, {}, ("context",)),
    "none cross": ("none", {}, {}, ("context", "key_mask")),
}  # fmt: skip


def make_layer(name, cp=None, **more):
    kind, options, own, _ = LAYERS[name]
    options = dict(options)
    randomized = options.pop("randomized", None)
    if options.get("scaling") == "dynamic":
        options["scaling"] = posenc.scaling.DynamicNTK(factor=2.0, original=6)
    torch.manual_seed(3)
    encoding = posenc.create(kind, d_model=D_MODEL, heads=HEADS, head_dim=SIZE, **options)
    if randomized:
        encoding = posenc.Randomized(encoding=encoding, max_length=randomized)
    return posenc.Attention(
        D_MODEL, HEADS, head_dim=SIZE, encoding=encoding, context_parallel=cp, **{**own, **more}
    ).double()  # fmt: skip


def make_arguments(name, length, generator):
    """(states, arguments of forward) of the whole sequence."""
    x = torch.randn(BATCH, length, D_MODEL, generator=generator, dtype=torch.float64)
    arguments = {}
    given = LAYERS[name][3]
    if "context" in given:
        arguments["context"] = torch.randn(BATCH, 2 * length, D_MODEL, generator=generator, dtype=torch.float64)
    if "key_mask" in given:
        keys = 2 * length if "context" in given else length
        arguments["key_mask"] = torch.ones(BATCH, keys, dtype=torch.bool)
        arguments["key_mask"][0, :3] = False
        arguments["key_mask"][1, -5:] = False
    if "documents" in given:
        arguments["documents"] = (torch.rand(BATCH, length, generator=generator) < 0.2).cumsum(-1)
    if "positions" in given:
        arguments["positions"] = torch.arange(length).repeat(BATCH, 1) * 2 + torch.tensor([[3], [9]])
    if "segments" in given:
        arguments["segments"] = (torch.arange(length)[None] // 5).expand(BATCH, -1)
    if "axes" in given:
        arguments["positions"] = torch.randint(0, 9, (BATCH, length, 2), generator=generator)
    return x, arguments


def compare_layer(group, name, strategy, balance):
    """Output, gradient of the input and the sum of every parameter's gradient against one process's."""
    cp = parallel.ContextParallel(group, strategy=strategy, balance=balance, timeout=30.0)
    length = 4 * cp.unit
    generator = torch.Generator().manual_seed(1)
    x, arguments = make_arguments(name, length, generator)
    weight = torch.randn(BATCH, length, D_MODEL, generator=generator, dtype=torch.float64)
    whole, part = make_layer(name), make_layer(name, cp)
    x.requires_grad_()
    torch.manual_seed(5)
    exact = whole(x, **arguments)
    (exact * weight).sum().backward()
    own = local(x.detach(), cp, 1).clone().requires_grad_()
    torch.manual_seed(5 if cp.rank == 0 else 50 + cp.rank)  # rank 0 draws for all
    found = part(own, **{key: local(value, cp, 1) for key, value in arguments.items()})
    (found * local(weight, cp, 1)).sum().backward()
    errors = [difference(found, local(exact, cp, 1)), difference(own.grad, local(x.grad, cp, 1))]
    parallel.reduce_gradients(part, cp)
    for (key, a), b in zip(part.named_parameters(), whole.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), key
        if b.grad is not None:
            errors.append(difference(a.grad, b.grad))
    assert max(errors) < 1e-10, (name, strategy, balance, errors)


def compare_layers(group, cases):
    failed = []
    for case in cases:
        try:
            compare_layer(group, *case)
        except AssertionError as error:
            failed.append(str(error))
        except Exception as error:
            raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
    assert not failed, "\n".join(failed)


def compare_dropout(group, encoding, strategy, balance, engine):
    """The same probabilities are dropped as in one process that draws the seed of rank 0."""
    cp = parallel.ContextParallel(group, strategy=strategy, balance=balance, timeout=30.0)
    length = 4 * cp.unit
    generator = torch.Generator().manual_seed(1)
    dtype = torch.float32 if engine == "triton" else torch.float64
    tensors = [torch.randn(BATCH, HEADS, length, SIZE, generator=generator, dtype=dtype) for _ in range(4)]
    torch.manual_seed(7)
    module = make_encoding(encoding, dtype)
    own = [local(x, cp, 2).clone().requires_grad_() for x in tensors[:3]]
    q, k, v = (x.requires_grad_() for x in tensors[:3])
    torch.manual_seed(11)
    exact = posenc.attend(q, k, v, module.plan(posenc.Positions(length)), dropout=0.4, causal=True, engine=engine)
    (exact * tensors[3]).sum().backward()
    torch.manual_seed(11 if cp.rank == 0 else cp.rank)
    found = parallel.attend(*own, module, context_parallel=cp, dropout=0.4, causal=True, engine=engine)
    (found * local(tensors[3], cp, 2)).sum().backward()
    pairs = [(found, local(exact, cp, 2))]
    pairs += [(a.grad, local(b.grad, cp, 2)) for a, b in zip(own, (q, k, v), strict=True)]
    errors = [difference(a, b) for a, b in pairs]
    assert max(errors) < (1e-5 if engine == "triton" else 1e-10), (encoding, strategy, balance, engine, errors)


def compare_dropouts(group, cases):
    for case in cases:
        compare_dropout(group, *case)


def count_far_blocks(group):
    """How many of the calls of a ring step had a plan without lookups."""
    from posenc.parallel import blocks

    cp = parallel.ContextParallel(group, strategy="ring", balance="zigzag")
    x = torch.randn(1, HEADS, 64, SIZE, dtype=torch.float64)
    plans, plain = [], blocks.attend

    def noted(q, k, v, plan, **options):
        plans.append(plan)
        return plain(q, k, v, plan, **options)

    blocks.attend = noted
    try:
        parallel.attend(x, x, x, make_encoding("t5"), context_parallel=cp, causal=True)
    finally:
        blocks.attend = plain
    return sum(not plan.lookups for plan in plans)


def repeats(group, strategy):
    """Whether two calls give the same bits: outputs and gradients."""
    cp = parallel.ContextParallel(group, strategy=strategy, balance="zigzag")
    results = []
    for _ in range(2):
        torch.manual_seed(4)
        module = make_encoding("shaw", torch.float32)
        q, k, v = (torch.randn(BATCH, HEADS, 16, SIZE, requires_grad=True) for _ in range(3))
        out = parallel.attend(q, k, v, module, context_parallel=cp, causal=True)
        out.square().sum().backward()
        results.append([out, q.grad, k.grad, v.grad, *(p.grad for p in module.parameters())])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))
