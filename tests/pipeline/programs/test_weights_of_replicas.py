"""What the gradients of each replica count is summed first of all, and holds nobody up."""

from __future__ import annotations

from smp_tf.pipeline.programs.check import check
from smp_tf.pipeline.programs.simulate import simulate
from smp_tf.pipeline.programs.text import parse, parse_program
from smp_tf.pipeline.programs.weights_of_replicas import add_weights_of_replicas


def test_every_rank_begins_with_it() -> None:
    plain = parse_program("0F0 0B0\n1F0 1B0")
    program = add_weights_of_replicas(plain)
    check(program)
    assert program.text().splitlines() == ["0WEIGH 0F0 0B0", "1WEIGH 1F0 1B0"]
    once = {parse("0WEIGH"): 3.0}
    assert simulate(program, once=once).step_time == simulate(plain).step_time == 6.0
    assert simulate(program, once={parse("0WEIGH"): 30.0}).step_time == 30.0
