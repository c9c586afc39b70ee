"""Modules computed anew: each law on a layer trained in float32 by numpy, whole and with one fault."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from run_building import RunBuilder, findings_of, outcome_of, ranks

S, B, H, HEADS, V = 12, 2, 16, 2, 20
D = H // HEADS
LAYER = "decoder.layers.0"
ATTENTION = f"{LAYER}.self_attention"
CORE = f"{ATTENTION}.core_attention"

IDS = (
    "fprop.not_of_its_inputs",
    "dgrad.not_of_its_inputs",
    "wgrad.not_of_its_tokens",
    "wgrad.operand_not_received",
    "loss.not_of_logits",
    "loss.gradient_not_of_logits",
)


def module(fqn, kind, **values):
    return {"fqn": fqn.replace(".0", ".*"), "class": f"megatron.core.{kind}", "values": values}


MODULES = (
    module("embedding.word_embeddings", "VocabParallelEmbedding", reduce_scatter_embeddings=False),
    module("rotary_pos_emb", "RotaryEmbedding", rotary_interleaved=False),
    module(f"{LAYER}.input_layernorm", "LayerNorm", eps=1e-5),
    module(ATTENTION, "SelfAttention"),
    module(f"{ATTENTION}.q_layernorm", "IdentityOp"),
    module(f"{ATTENTION}.k_layernorm", "IdentityOp"),
    module(f"{ATTENTION}.linear_qkv", "ColumnParallelLinear", skip_bias_add=False),
    module(CORE, "DotProductAttention"),
    module(f"{LAYER}.mlp", "MLP"),
    module(f"{LAYER}.mlp.linear_fc1", "ColumnParallelLinear", skip_bias_add=True),
    module(f"{LAYER}.mlp.linear_fc2", "RowParallelLinear", skip_bias_add=True),
    module("output_layer", "ColumnParallelLinear", skip_bias_add=False),
)
CONFIG = {
    "transformer_config": {
        "activation_func": "torch._C._nn.gelu",
        "attention_dropout": 0.0,
        "num_attention_heads": HEADS,
    }
}


@dataclass
class Layer:
    """Embedding, norm, attention, MLP and output layer in float32; ``faults`` replace what a step gives.

    Attributes:
        faults: by name of an intermediate result, what takes its place.
        dtype: in which every tensor is recorded, and computed: float32, or float16.
        keep: elements are kept.
    """

    faults: dict = field(default_factory=dict)
    dtype: type = np.float32
    keep: bool = True
    mask: bool = True
    hides: int | None = None
    """The key that the softmax hides from every later query, beyond the mask that was handed in."""
    fused: bool = False
    """The output layer's GEMM adds dW to main_grad itself."""
    gradient: float = 1.0
    """Size of the gradient that comes to attention."""
    shows: bool = False
    """The softmax shows each query its successor, which the mask that was handed in hides."""
    config: dict = field(default_factory=lambda: CONFIG)

    def __post_init__(self):
        random = np.random.default_rng(7)
        shapes = {
            "embedding.word_embeddings.weight": (V, H),
            f"{LAYER}.input_layernorm.weight": (H,),
            f"{LAYER}.input_layernorm.bias": (H,),
            f"{ATTENTION}.linear_qkv.weight": (3 * H, H),
            f"{ATTENTION}.linear_qkv.bias": (3 * H,),
            f"{LAYER}.mlp.linear_fc1.weight": (4 * H, H),
            f"{LAYER}.mlp.linear_fc1.bias": (4 * H,),
            f"{LAYER}.mlp.linear_fc2.weight": (H, 4 * H),
        }
        self.weights = {name: self._cast(random.normal(0, 0.3, shape)) for name, shape in shapes.items()}
        self.builder = RunBuilder(
            keep=self.keep, parameters=shapes, config=self.config, modules=MODULES, dtype=self.dtype.__name__
        )
        for name, value in self.weights.items():
            self.builder.add("param", "init", name, value, step=-1)
        self.random = random

    def _cast(self, value):
        return np.asarray(value).astype(self.dtype)

    def _made(self, name, value, dtype=None):
        """Return what an operation gave, or what a fault makes of it."""
        value = np.asarray(value).astype(dtype or self.dtype)
        return self.faults[name](value).astype(value.dtype) if name in self.faults else value

    def _saw(self, phase, fqn, role, value, slot="0"):
        self.builder.add(role, phase, fqn, value, slot=slot, microbatch=0)
        return value

    def _call(self, fqn, given, gave):
        self._saw("fprop", fqn, "input", given)
        self._saw("fprop", fqn, "output", gave)
        return gave

    def write(self, directory):
        w = {name: value.astype(np.float64) for name, value in self.weights.items()}
        tokens = self.random.integers(0, V, (B, S))
        labels = self.random.integers(0, V, (B, S))
        self._saw("fprop", "", "input", tokens)
        self._saw("fprop", "", "input", labels, "labels")
        table = w["embedding.word_embeddings.weight"]
        x = self._call("embedding.word_embeddings", tokens, self._made("embedded", table[tokens]))
        x = self._cast(np.swapaxes(x, 0, 1))
        frequencies = 10_000.0 ** (-np.arange(D // 2) / (D // 2))
        angles = np.tile(np.arange(S)[:, None] * frequencies, 2).reshape(S, 1, 1, D)
        angles = self._saw("fprop", "rotary_pos_emb", "output", self._made("angles", angles, "f4"))
        deviation = np.sqrt(x.astype("f8").var(-1, keepdims=True) + 1e-5)
        normed = (x - x.astype("f8").mean(-1, keepdims=True)) / deviation
        normed = normed * w[f"{LAYER}.input_layernorm.weight"] + w[f"{LAYER}.input_layernorm.bias"]
        normed = self._call(f"{LAYER}.input_layernorm", x, self._made("normed", normed))
        self._saw("fprop", ATTENTION, "input", normed)
        self._saw("fprop", ATTENTION, "input", angles, "rotary_pos_emb")
        qkv_weight = w[f"{ATTENTION}.linear_qkv.weight"]
        qkv = normed.astype("f8") @ qkv_weight.T + w[f"{ATTENTION}.linear_qkv.bias"]
        qkv = self._call(f"{ATTENTION}.linear_qkv", normed, self._made("qkv", qkv))
        q, k, v = np.split(qkv.reshape(S, B, HEADS, 3 * D), 3, -1)
        q, k = (self._call(f"{ATTENTION}.{n}_layernorm", t, t) for n, t in (("q", q), ("k", k)))
        q, k = self._made("q", self._turned(q, angles)), self._made("k", self._turned(k, angles))
        core = self._attended(q, k, v)
        self._grads(core, q, k, v)
        self._mlp(normed, w)
        self._head(normed, table, tokens, labels)
        return self.builder.write(directory)

    def _turned(self, t, angles):
        one, two = np.split(t.astype("f8"), 2, -1)
        turned = np.concatenate((-two, one), -1)
        return t * np.cos(angles.astype("f8")) + turned * np.sin(angles.astype("f8"))

    def _attended(self, q, k, v):
        hidden = np.triu(np.ones((S, S), bool), 1)
        for slot, one in enumerate((q, k, v)):
            self._saw("fprop", CORE, "input", one, str(slot))
        if self.mask:
            self.builder.add(
                "input", "fprop", CORE, hidden[None, None].astype("u1"), slot="3", microbatch=0, dtype="bool"
            )
        if self.hides is not None or self.shows:
            hidden = np.triu(np.ones((S, S), bool), 2 if self.shows else 1)
            if self.hides is not None:
                hidden[self.hides + 1 :, self.hides] = True
            inner = f"{CORE}.scale_mask_softmax"
            self.builder.add(
                "input", "fprop", inner, hidden[None, None].astype("u1"), slot="1", microbatch=0, dtype="bool"
            )
        scores = np.einsum("sbhd,tbhd->bhst", q.astype("f8"), k.astype("f8")) / math.sqrt(D)
        powers = np.exp(np.where(hidden, -np.inf, scores - scores.max(-1, keepdims=True)))
        self.p = powers / powers.sum(-1, keepdims=True)
        out = np.einsum("bhst,tbhd->sbhd", self.p, v.astype("f8")).reshape(S, B, H)
        return self._saw("fprop", CORE, "output", self._made("core", out))

    def _grads(self, core, q, k, v):
        arrived = self._cast(self.random.normal(0, self.gradient, (S, B, H)))
        self._saw("dgrad", CORE, "grad_output", arrived)
        out = arrived.astype("f8").reshape(S, B, HEADS, D)
        dv = np.einsum("bhst,sbhd->tbhd", self.p, out)
        dp = np.einsum("sbhd,tbhd->bhst", out, v.astype("f8"))
        ds = self.p * (dp - (self.p * dp).sum(-1, keepdims=True)) / math.sqrt(D)
        dq = np.einsum("bhst,tbhd->sbhd", ds, k.astype("f8"))
        dk = np.einsum("bhst,sbhd->tbhd", ds, q.astype("f8"))
        for slot, (name, grad) in enumerate((("dq", dq), ("dk", dk), ("dv", dv))):
            self._saw("dgrad", CORE, "grad_input", self._made(name, grad), str(slot))

    def _mlp(self, x, w):
        first, second = f"{LAYER}.mlp.linear_fc1", f"{LAYER}.mlp.linear_fc2"
        normed = self._cast(x * 0.5)  # what no other module reads
        self._saw("fprop", f"{LAYER}.pre_mlp_layernorm", "output", normed)
        self._saw("fprop", f"{LAYER}.mlp", "input", normed)
        hidden = normed.astype("f8") @ w[f"{first}.weight"].T
        hidden = self._call(first, normed, self._made("fc1", hidden))
        biased = hidden + w[f"{first}.bias"]
        erf = np.vectorize(math.erf)(biased / math.sqrt(2))
        active = self._made("active", biased * 0.5 * (1 + erf))
        gave = self._call(second, active, self._made("fc2", active.astype("f8") @ w[f"{second}.weight"].T))
        back = self._cast(self.random.normal(0, 1, gave.shape))
        self._saw("dgrad", second, "grad_output", back)
        self._operands(second, back, active)
        self._saw("dgrad", second, "grad_input", self._made("dx", back.astype("f8") @ w[f"{second}.weight"]))

    def _operands(self, fqn, back, given):
        rows = self._made("operand", given.reshape(-1, given.shape[-1]))
        columns = back.reshape(-1, back.shape[-1])
        for role, value in (
            ("grad_output", columns),
            ("input", rows),
            ("wgrad", self._cast(columns.astype("f8").T @ rows.astype("f8"))),
        ):
            self._saw("wgrad", fqn, role, value, "")

    def _head(self, x, table, tokens, labels):
        weight = self._saw("fprop", "output_layer", "input", self._cast(table), "weight")
        logits = x.astype("f8") @ weight.astype("f8").T
        logits = self._call("output_layer", x, self._made("logits", logits))
        wide = logits.astype("f8")
        log = np.log(np.exp(wide).sum(-1))
        losses = log - np.take_along_axis(wide, labels.T[..., None], -1)[..., 0]
        losses = self._made("losses", losses.T, "f4")
        self._saw("fprop", "", "output", losses)
        each = self._saw("dgrad", "", "grad_output", np.full((B, S), 1 / (B * S), "f4"))
        grad = np.exp(wide - log[..., None])
        np.put_along_axis(
            grad, labels.T[..., None], np.take_along_axis(grad, labels.T[..., None], -1) - 1, -1
        )
        grad = self._made("dlogits", grad * each.T[..., None])
        self._saw("dgrad", "output_layer", "grad_output", grad)
        tied = self._cast(grad.reshape(-1, V).T.astype("f8") @ x.reshape(-1, H))
        note = "difference of main_grad after and before a fused GEMM" if self.fused else ""
        self.builder.add("wgrad", "wgrad", "output_layer", tied, microbatch=0, note=note)
        arrived = self._cast(self.random.normal(0, 1, (B, S, H)))
        self._saw("dgrad", "embedding.word_embeddings", "grad_output", arrived)
        whole = tied.astype("f8") * (not self.fused)
        np.add.at(whole, tokens.reshape(-1), arrived.reshape(-1, H).astype("f8"))
        self._saw("wgrad", "embedding.word_embeddings.weight", "wgrad", self._made("dembedding", whole), "")


@pytest.mark.parametrize(
    "settings",
    [{}, {"dtype": np.float16}, {"mask": False}, {"fused": True}],
    ids=["float32", "float16", "no mask was handed in", "a fused output layer"],
)
def test_nothing_is_found_in_a_healthy_layer(tmp_path, settings):
    run = Layer(**settings).write(tmp_path / "run")
    assert findings_of(run, *IDS) == {}
    assert outcome_of(run, "fprop.not_of_its_inputs").exercised == 11
    assert outcome_of(run, "dgrad.not_of_its_inputs").exercised == 4
    for name in IDS[2:]:
        assert outcome_of(run, name).exercised


def nudged(value):
    """One element of many, by a tenth."""
    changed = value.copy()
    changed.reshape(-1)[changed.size // 2] *= 1.1
    return changed


def one_row(value):
    changed = value.copy()
    changed.reshape(-1, changed.shape[-1])[3] = 0
    return changed


def other_rows(value):
    return value.reshape(-1, value.shape[-1])[::-1].reshape(value.shape)


def misread(value):
    return np.ascontiguousarray(np.swapaxes(value, -1, -2)).reshape(value.shape)


@pytest.mark.parametrize(
    ("what", "change", "id_", "fqn"),
    [
        ("embedded", one_row, "fprop.not_of_its_inputs", "embedding.word_embeddings"),
        ("normed", lambda x: x * 1.001, "fprop.not_of_its_inputs", f"{LAYER}.input_layernorm"),
        ("normed", one_row, "fprop.not_of_its_inputs", f"{LAYER}.input_layernorm"),
        ("qkv", lambda x: x * 1.01, "fprop.not_of_its_inputs", f"{ATTENTION}.linear_qkv"),
        ("angles", lambda x: x.astype("f2"), "fprop.not_of_its_inputs", "rotary_pos_emb"),
        ("q", other_rows, "fprop.not_of_its_inputs", CORE),
        ("core", nudged, "fprop.not_of_its_inputs", CORE),
        ("core", lambda x: np.roll(x, 1, 0), "fprop.not_of_its_inputs", CORE),
        ("active", lambda x: np.maximum(x, 0), "fprop.not_of_its_inputs", f"{LAYER}.mlp.linear_fc2"),
        ("fc2", one_row, "fprop.not_of_its_inputs", f"{LAYER}.mlp.linear_fc2"),
        ("dq", lambda x: x * 1.001, "dgrad.not_of_its_inputs", CORE),
        ("dk", one_row, "dgrad.not_of_its_inputs", CORE),
        ("dv", misread, "dgrad.not_of_its_inputs", CORE),
        ("dx", lambda x: x * 1.02, "dgrad.not_of_its_inputs", f"{LAYER}.mlp.linear_fc2"),
        ("operand", other_rows, "wgrad.operand_not_received", f"{LAYER}.mlp.linear_fc2"),
        ("operand", misread, "wgrad.operand_not_received", f"{LAYER}.mlp.linear_fc2"),
        ("operand", nudged, "wgrad.operand_not_received", f"{LAYER}.mlp.linear_fc2"),
        ("losses", lambda x: x + math.log(2), "loss.not_of_logits", ""),
        ("dlogits", lambda x: x * 0, "loss.gradient_not_of_logits", "output_layer"),
        ("dlogits", lambda x: x * 2, "loss.gradient_not_of_logits", "output_layer"),
        ("dembedding", nudged, "wgrad.not_of_its_tokens", "embedding.word_embeddings.weight"),
    ],
)
def test_a_fault_is_found_where_it_is(tmp_path, what, change, id_, fqn):
    finding = findings_of(Layer(faults={what: change}).write(tmp_path / "run"), *IDS)[id_]
    assert finding.where.fqn == fqn
    assert finding.severity.value == "error"


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("normed", "fprop.not_of_its_inputs"),
        ("dq", "dgrad.not_of_its_inputs"),
        ("dembedding", "wgrad.not_of_its_tokens"),
        ("losses", "loss.not_of_logits"),
    ],
)
def test_what_is_not_finite_was_not_looked_at(tmp_path, what, name):
    """It has a law of its own; this one says that it left the record out, and does not count it."""

    def broken(value):
        changed = value.copy()
        changed.reshape(-1)[0] = np.nan
        return changed

    whole = outcome_of(Layer().write(tmp_path / "healthy"), name)
    outcome = outcome_of(Layer(faults={what: broken}).write(tmp_path / "broken"), name)
    assert outcome.exercised < whole.exercised
    assert "finite elements" in outcome.skipped
    assert not outcome.failed


def test_how_operands_differ_is_said(tmp_path):
    for name, change, words in (
        ("rows", other_rows, "its rows are in another order"),
        ("places", misread, "other strides"),
        ("numbers", nudged, "other numbers"),
    ):
        run = Layer(faults={"operand": change}).write(tmp_path / name)
        finding = findings_of(run)["wgrad.operand_not_received"]
        assert words in " ".join((finding.title, *finding.evidence))


def test_another_approximation_than_that_of_the_configuration(tmp_path):
    def config(fused):
        return {"transformer_config": {**CONFIG["transformer_config"], "bias_activation_fusion": fused}}

    def tanh(active):  # what the fused kernel computes
        return self_active(active)

    layer = Layer(config=config(True))
    w, first = layer.weights, f"{LAYER}.mlp.linear_fc1"
    seen = {}

    def self_active(_):
        biased = seen["fc1"].astype("f8") + w[f"{first}.bias"].astype("f8")
        return biased * 0.5 * (1 + np.tanh(0.79788456 * biased * (1 + 0.044715 * biased**2)))

    for fused, healthy in ((True, True), (False, False)):
        layer = Layer(config=config(fused))
        layer.faults = {"fc1": lambda x: seen.setdefault("fc1", x), "active": tanh}
        found = findings_of(layer.write(tmp_path / f"run{fused}"), "fprop.not_of_its_inputs")
        assert (found == {}) is healthy
        seen.clear()


def test_without_elements_nothing_is_computed_and_it_is_said(tmp_path):
    run = Layer(keep=False).write(tmp_path / "run")
    for name in ("fprop.not_of_its_inputs", "dgrad.not_of_its_inputs", "loss.not_of_logits"):
        outcome = outcome_of(run, name)
        assert not outcome.exercised
        assert "without" in outcome.skipped or "no elements" in outcome.skipped


@pytest.mark.parametrize(
    "change", [{"window_size": [4, 0]}, {"multi_latent_attention": True}, {"attention_dropout": 0.1}]
)
def test_attention_of_another_kind_is_left_out_by_name(tmp_path, change):
    config = {"transformer_config": {**CONFIG["transformer_config"], **change}}
    run = Layer(config=config, faults={"core": one_row, "dv": misread}).write(tmp_path / "run")
    assert findings_of(run, "fprop.not_of_its_inputs", "dgrad.not_of_its_inputs") == {}
    assert "core attention" in outcome_of(run, "fprop.not_of_its_inputs").skipped


def test_attention_may_hide_more_than_it_was_told_and_show_no_more(tmp_path):
    attention = ("fprop.not_of_its_inputs", "dgrad.not_of_its_inputs")
    assert findings_of(Layer(hides=1).write(tmp_path / "healthy"), *attention) == {}
    found = findings_of(Layer(shows=True).write(tmp_path / "faulty"), *attention)
    assert found["fprop.not_of_its_inputs"].where.fqn == CORE


def test_a_linear_with_an_adapter_is_left_out_by_name(tmp_path):
    layer = Layer(faults={"qkv": lambda x: x * 1.5})
    layer.builder._parameters[f"{ATTENTION}.linear_qkv.adapter.0.weight"] = (4, H)
    run = layer.write(tmp_path / "run")
    assert findings_of(run, "fprop.not_of_its_inputs") == {}
    assert "an adapter" in outcome_of(run, "fprop.not_of_its_inputs").skipped


def test_gradients_that_float16_rounds_to_nothing_are_no_fault(tmp_path):
    tiny = {name: (lambda x: x * 0) for name in ("dq", "dk", "dv")}
    layer = Layer(dtype=np.float16, faults=tiny, gradient=1e-8)
    assert findings_of(layer.write(tmp_path / "run"), "dgrad.not_of_its_inputs") == {}


MOE = f"{LAYER}.mlp"
EXPERTS = 4


def routed(directory, *, fault=lambda rows: rows, bias=None, dtype=np.float32, world=1):
    """Two steps of a router with a bias, in one layer; ``fault`` changes what the experts receive."""
    random = np.random.default_rng(3)
    config = {
        "transformer_config": {
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.001,
            "num_moe_experts": EXPERTS,
        }
    }
    modules = (module(MOE, "MoELayer"), module(f"{MOE}.router", "TopKRouter"))
    builder = RunBuilder(ranks(world), keep=True, config=config, modules=modules)
    name = f"{MOE}.router.expert_bias"
    told = bias or {}
    held = told.get(-1, np.zeros(EXPERTS, np.float32))
    builder.add("buffer", "init", name, held, step=-1, slot="persistent")
    for step in range(2):
        counts = np.zeros(EXPERTS)
        for rank in range(world):
            tokens = random.normal(0, 1, (6, 2, H)).astype(np.float32)
            flat = tokens.reshape(-1, H)
            chosen = np.zeros((len(flat), EXPERTS), bool)
            for row in chosen:
                row[random.choice(EXPERTS, 2, replace=False, p=[0.4, 0.3, 0.2, 0.1])] = True
            rows = np.concatenate([flat[chosen[:, expert]] for expert in range(EXPERTS)])
            at = {"rank": rank, "step": step, "microbatch": 0}
            builder.add("input", "fprop", MOE, tokens, slot="0", **at)
            builder.add("output", "fprop", f"{MOE}.router", chosen.astype("u1"), slot="1", dtype="bool", **at)
            builder.add("input", "fprop", f"{MOE}.experts", fault(rows), slot="0", **at)
            builder.add("input", "fprop", f"{MOE}.experts", chosen.sum(0).astype(np.int64), slot="1", **at)
            counts += chosen.sum(0)
        held = held + np.float32(0.001) * np.sign(counts.mean() - counts).astype(np.float32)
        kept = told.get(step, lambda value, rank: value)
        for rank in range(world):
            value = kept(held, rank).astype(dtype)
            builder.add("buffer", "optimizer", name, value, rank=rank, step=step, slot="persistent")
    return builder.write(directory)


ROUTING = ("fprop.tokens_misrouted", "buffers.expert_bias_not_recomputed", "buffers.copies_differ")


@pytest.mark.parametrize("world", [1, 2])
def test_a_router_and_its_experts_that_are_right(tmp_path, world):
    run = routed(tmp_path / "run", world=world)
    assert findings_of(run, *ROUTING) == {}
    assert outcome_of(run, ROUTING[0]).exercised == 2 * EXPERTS * world
    assert outcome_of(run, ROUTING[1]).exercised == 3 * world
    assert outcome_of(run, ROUTING[2]).exercised == (3 if world > 1 else 0)


def test_rows_may_come_in_any_order_within_an_expert(tmp_path):
    def swapped(rows):
        rows = rows.copy()
        rows[[0, 1]] = rows[[1, 0]]
        return rows

    assert "fprop.tokens_misrouted" not in findings_of(routed(tmp_path / "run", fault=swapped))


def test_tokens_of_another_expert(tmp_path):
    found = findings_of(routed(tmp_path / "run", fault=lambda rows: np.roll(rows, 3, 0)))
    assert found["fprop.tokens_misrouted"].where.fqn == f"{MOE}.experts"


@pytest.mark.parametrize(
    ("settings", "step", "words"),
    [
        ({"bias": {-1: np.array([0.3, 0, 0, 0], np.float32)}}, -1, "does not begin at 0"),
        ({"bias": {1: lambda value, rank: value * 0}}, 1, "make"),
        ({"dtype": np.float16}, 0, "kept in float16"),
    ],
    ids=["moved before the start", "not updated", "16 bits"],
)
def test_a_bias_that_the_tokens_do_not_explain(tmp_path, settings, step, words):
    finding = findings_of(routed(tmp_path / "run", **settings))["buffers.expert_bias_not_recomputed"]
    assert finding.where.step == step
    assert words in " ".join((finding.title, *finding.evidence))


def test_copies_of_a_buffer_that_drift_apart(tmp_path):
    bias = {0: lambda value, rank: value + np.float32(rank)}
    found = findings_of(routed(tmp_path / "run", world=2, bias=bias))
    assert found["buffers.copies_differ"].where.step == 0


def drawn(directory, *, alike=()):
    """Two data-parallel ranks with dropout over three steps; in the steps of ``alike`` both draw the same."""
    random = np.random.default_rng(5)
    builder = RunBuilder(ranks(2), keep=True)
    given = np.ones((4, 8), np.float32)
    for step in range(3):
        common = random.random((4, 8)) < 0.2
        for rank in range(2):
            mask = common if step in alike else random.random((4, 8)) < 0.2
            at = {"rank": rank, "step": step, "microbatch": 0}
            builder.add("input", "fprop", "embedding.embedding_dropout", given, slot="0", **at)
            gave = np.where(mask, 0, given / 0.8).astype(np.float32)
            builder.add("output", "fprop", "embedding.embedding_dropout", gave, slot="0", **at)
            state = np.array([step if step in alike else step * 10 + rank], np.int64)
            builder.add("rng", "batch", "rng", state, slot="torch", rank=rank, step=step)
    return builder.write(directory)


def test_ranks_that_draw_apart_or_alike_from_the_start(tmp_path):
    assert "rng.became_equal" not in findings_of(drawn(tmp_path / "apart"))
    assert "rng.became_equal" not in findings_of(drawn(tmp_path / "alike", alike=(0, 1, 2)))
    assert outcome_of(drawn(tmp_path / "again"), "rng.became_equal").exercised == 4


def test_ranks_that_come_to_draw_alike(tmp_path):
    finding = findings_of(drawn(tmp_path / "run", alike=(2,)))["rng.became_equal"]
    assert finding.where.step == 2
    assert finding.severity.value == "warning"
