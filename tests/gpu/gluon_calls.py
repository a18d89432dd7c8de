"""What the checks of the Gluon backward passes with content terms share: one backward pass, its results against their budgets, and a
step through `attend`."""

from tests.gpu import hopper


def fail(error):
    raise error


def chosen(groups, only):
    """The groups of jobs whose names contain one of the texts; all without texts."""
    groups = [[job for job in group if not only or any(part in job["name"] for part in only)] for group in groups]
    return [group for group in groups if group]


class Call:
    """One backward pass, with what it needs. A subclass has `release`, which lets every length and size take the kernels or, without them,
    the Triton engine's; and `refuse`, by which the kernels refuse."""

    def __init__(self, batch, heads, kv_heads, lq, lk, size, masks, dtype, make_plan, timed=False):
        import torch

        from posenc.engines.triton import launch, launcher

        self.release()
        self.masks = hopper.make_masks(masks, batch, lq, lk, timed)
        self.q, self.k, self.v = hopper.make_tensors(batch, heads, kv_heads, lq, lk, size, dtype, "transposed")
        self.plan = make_plan()
        self.x, self.num, self.scale = hopper.prepare(self.q, self.k, self.v, self.plan, **self.masks)
        self.do = torch.randn_like(self.q)
        self.launch = launcher.launch
        with torch.no_grad():
            self.out, self.lse, self.mass = launch.run_forward(self.launch, self.x, self.num, self.scale, 0.0)

    def run(self, is_pair=False):
        """The gradients, by name; is_pair: by the Triton pair."""
        import torch

        from posenc.engines.triton.arguments import GRADIENTS
        from posenc.engines.triton.launch import _without_joined_bias, run_backward
        from posenc.engines.triton.ops import finish_gradient

        self.release(not is_pair)
        if not is_pair:
            reason = self.refuse(_without_joined_bias(self.x, self.num), self.num, self.scale, 0.0, self.do)
            assert reason is None, reason
        wanted = {name: getattr(self.x, name) is not None for name in GRADIENTS}
        with torch.no_grad():
            found = run_backward(self.launch, self.do, None, self.out, self.lse, self.mass, self.x, self.num, self.scale, 0.0, wanted)  # fmt: skip
            return {
                name: finish_gradient(self.launch, y, getattr(self.x, name)) for name, y in zip(GRADIENTS, found) if y is not None
            }  # fmt: skip

    def check(self, by_atomics=()):
        """Every result against its budget, and the same bits in four runs, but for gradients that are summed by atomics."""
        import torch

        from tests import budget

        expected, allowed = budget.expect(self.q, self.k, self.v, self.plan, self.do, **self.masks)
        first = self.run()
        for _ in range(3):
            now = self.run()
            same = {name: torch.equal(first[name], now[name]) for name in first if name not in by_atomics}
            assert all(same.values()) or any(x.isnan().any() for x in now.values()), f"different bits: {same}"
        results = {name: first.pop(name) for name in "qkv"}
        results["out"] = self.out
        for name, gradient in first.items():
            getattr(self.x, name).backward(gradient, retain_graph=True)
        results |= {name: x.grad for name, x in self.plan.tensors()}
        worst = {name: round(float(budget.excess(x, expected[name], allowed[name])), 3) for name, x in results.items()}
        if not all(x <= 1.0 for x in worst.values()):
            nans = {name: int(x.isnan().sum()) for name, x in results.items()}
            return {"failed": f"of its budget: {worst}; NaN: {nans}"}
        return {"worst": max(worst.values())}


def check_step(make_plan, masks, module):
    """Through `attend`, with every gradient, four times: the second call is recorded, the third replays. module: whose `run_backward` must
    have been called."""
    import torch

    from posenc import attend
    from tests import budget

    q, k, v = (x.requires_grad_() for x in hopper.make_tensors(1, 2, 1, 2300, 2300, 64, torch.bfloat16, "transposed"))
    plan, masks = make_plan(), hopper.make_masks(masks, 1, 2300, 2300)
    leaves = {"q": q, "k": k, "v": v, **dict(plan.tensors())}
    g = torch.randn_like(q)
    expected, allowed = budget.expect(q, k, v, plan, g, **masks)
    calls, run = [], module.run_backward
    module.run_backward = lambda *args, **options: calls.append(1) or run(*args, **options)
    worst = 0.0
    for _ in range(4):
        out = attend(q, k, v, plan, engine="triton", **masks)
        for name, ours in zip(leaves, torch.autograd.grad(out, list(leaves.values()), g)):
            worst = max(worst, float(budget.excess(ours, expected[name], allowed[name])))
    assert calls, "the kernel was not used"
    return {"worst": worst} if worst <= 1.0 else {"failed": f"{worst} of a budget"}


def plain_attention(q, k, v, causal):
    """cuDNN's attention without positions."""
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def print_checks(checked, seconds):
    """What failed, and a line that counts."""
    failed = [x for x in checked if "failed" in x]
    for x in failed:
        print("FAILED", x["name"], x["failed"])
    left, worst = sum("left out" in x for x in checked), [x["worst"] for x in checked if "worst" in x]
    print(f"{len(worst)} passed, {len(failed)} failed, {left} left out; worst {max(worst, default=0):.2f} of a budget; {seconds:.0f} s", flush=True)  # fmt: skip
