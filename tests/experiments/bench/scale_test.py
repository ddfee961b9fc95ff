"""The benchmark of many devices: known collectives of programs, and the tables."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec as P

from experiments.bench import __main__ as command, scale
from experiments.bench.collectives import collectives, nbytes
from tests.experiments.runs import as_people_run_it as as_people_run_it

B = 8 * 4 * 4  # bytes of an array f32[8, 4]
SENDING = {
    "all-reduce": (lambda x: jax.lax.psum(x, "x"), P(), 2 * B * 3 / 4),
    "all-gather": (lambda x: jax.lax.all_gather(x, "x", tiled=True), P("x"), 4 * B * 3 / 4),
    "reduce-scatter": (lambda x: jax.lax.psum_scatter(x, "x", tiled=True), P(), B * 3 / 4),
    "all-to-all": (lambda x: jax.lax.all_to_all(x, "x", 0, 0, tiled=True), P("x"), B * 3 / 4),
    "collective-permute": (lambda x: jax.lax.ppermute(x, "x", [(0, 1), (1, 0)]), P("x"), B),
}


def sent(send, spec, devices=4):
    """Return the collectives of four devices, each with its own array f32[8, 4]."""
    mesh = Mesh(jax.devices()[:4], ("x",)) if devices == 4 else jax.make_mesh((2, 2), ("x", "y"), (AxisType.Auto,) * 2)
    x = jax.ShapeDtypeStruct((8 if spec == P() else 8 * devices, 4), jnp.float32)
    f = jax.shard_map(send, mesh=mesh, in_specs=spec, out_specs=P("x"), check_vma=False)
    return collectives(jax.jit(f).lower(x).compile().as_text())


@pytest.mark.parametrize("kind", SENDING)
def test_bytes_that_are_known(kind):
    send, spec, moved = SENDING[kind]
    (row,) = sent(lambda x: send(x + 1), spec)
    assert (row.kind, row.moved, row.times) == (kind, moved, 1)


def test_loops_count_as_often_as_they_go_round():
    rows = sent(lambda x: jax.lax.fori_loop(0, 5, lambda i, x: jax.lax.psum(x * 0.5, "x"), x), P())
    assert [(row.kind, row.times, row.moved) for row in rows] == [("all-reduce", 5, 2 * B * 3 / 4)]


def test_branches_in_loops_count_too():
    """The branch that an iteration takes is not known, so every iteration counts."""
    send = lambda x: jax.lax.psum(x * 0.5, "x")
    body = lambda x, take: (jax.lax.cond(take, send, lambda x: x, x), None)
    taken = jnp.array([True, False, True, False, True])
    rows = sent(lambda x: jax.lax.scan(body, x, jnp.roll(taken, jnp.int32(x[0, 0])))[0], P())
    assert [(row.kind, row.times) for row in rows] == [("all-reduce", 5)]


def test_only_those_that_take_part_are_counted():
    (row,) = sent(lambda x: jax.lax.psum(x, "x"), P(), devices=2)
    assert row.moved == 2 * B * 1 / 2


def test_what_is_begun_and_done_is_one():
    """Programs for GPUs are written so, because devices do other work meanwhile."""
    text = """
HloModule m, num_partitions=4

ENTRY %main (x: f32[2,4]) -> f32[8,4] {
  %ag-start = ((f32[2,4]{1,0}, s8[2]{0}), (f32[8,4]{1,0}, s8[8]{0})) all-gather-start(%x, %y), replica_groups=[1,4]<=[4]
  %ag-done = (f32[8,4]{1,0}, s8[8]{0}) all-gather-done(%ag-start)
  %ar = f32[8,4]{1,0} all-reduce(%z), replica_groups={{0,1},{2,3}}, to_apply=%add, metadata={op_name="jit(f)/sum"}
  ROOT %rs = bf16[2,4]{1,0} reduce-scatter(%ar), replica_groups={}, to_apply=%add
}
"""
    rows = collectives(text)
    assert [row[:4] for row in rows] == [
        ("all-gather", "(f32[8,4], s8[8])", (B + 8) * 3 / 4, 1),
        ("all-reduce", "f32[8,4]", 2 * B / 2, 1),
        ("reduce-scatter", "bf16[2,4]", 3 * 16, 1),
    ]
    assert rows[1].name == "jit(f)/sum"
    assert nbytes("(pred[], f8e4m3fn[3]{0}, u32[2,2])") == 1 + 3 + 16


@pytest.mark.processes
@pytest.mark.rare
def test_all_tables(tmp_path, monkeypatch):
    """One device in a process of its own, and the four of this process. Restarts are faked."""
    apart = scale.apart

    def instead(n, what, *words, cache=""):
        if what == "start":
            return [1.0] * len(scale.PARTS)
        return apart(n, what, *words) if n == 1 else scale.step(*words)

    monkeypatch.setattr(scale, "apart", instead)
    monkeypatch.setattr(scale, "short", lambda *_, cache: (9.0, 9.0, 2.0))
    cuts = {"4 x data": [], "4 x fsdp": ["--config.mesh.fsdp=4"]}
    monkeypatch.setattr(scale, "meshes", lambda n: {"1 device": []} if n == 1 else cuts)
    monkeypatch.setattr(scale, "COUNTS", (1, 4))
    monkeypatch.setattr(scale, "EVERY", (2,))
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    assert command.main(["scale", "--config", "configs/vit_sste.py:smoke", "--rounds", "1", "--save", "here"]) == 0
    text = (tmp_path / "here.md").read_text()
    titles = [
        "A step on several devices",
        "What a device holds",
        "Saving",
        "Starting again",
        "The parts of a warm start",
    ]
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == titles
    (row,) = (line for line in text.splitlines() if "smoke 4 x data" in line)
    assert row.split("|")[7].strip() == "1.00"  # over the least: nothing is sent but gradients and figures
