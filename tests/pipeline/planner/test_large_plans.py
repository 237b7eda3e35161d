"""Large models are planned in the time it takes to trace them, and in memory that does not depend on their weights.

Processor seconds, imports included: they depend less than others on what else runs, of which there should be nothing.
The weights of the first two alone are 1 and 6 GB, those of the last one 699.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import tensorflow as tf
import transformers

def bert_large():
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    return of(transformers.TFBertForMaskedLM(transformers.BertConfig(**sizes)))

def gpt2_xl():
    return of(transformers.TFGPT2LMHeadModel(transformers.GPT2Config(n_embd=1600, n_layer=48, n_head=25)))

def gpt3():
    sizes = {"n_embd": 12288, "n_layer": 96, "n_head": 96, "n_positions": 2048}
    return of(transformers.TFGPT2LMHeadModel(transformers.GPT2Config(**sizes)), 64, 2048)

def of(model, batch=32, length=128):
    tokens = {"input_ids": tf.TensorSpec([batch, length], tf.int32)}
    return model, tokens, lambda outputs: tf.reduce_mean(outputs.logits)
"""

CLUSTER = """
hosts: [{count: 1024, ranks: 8, memory: 80GiB, flops: 150e12, memory_bandwidth: 1.5e12}]
within_host: 300e9
between_hosts: 25e9
"""
FOUR = ("--partitions", "4", "--microbatches", "8")
#: Of 80 GiB a rank; without recompute a stage of this model needs more.
MANY = ("--partitions", "64", "--replicas", "128", "--microbatches", "64", "--recompute", "--cluster", "cluster.yaml")

#: Runs the command and says what it took, imports included.
TIMED = r"""
import json, pathlib, re, resource, sys, time
began = time.monotonic()
from smp_tf.command.main import main
code = main(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_SELF)
# ru_maxrss begins with what the parent had.
peak = re.search(r"VmHWM:\s*(\d+) kB", pathlib.Path("/proc/self/status").read_text())
figures = [code, time.monotonic() - began, used.ru_utime + used.ru_stime, int(peak[1]) << 10]
print(json.dumps(figures), file=sys.stderr)
"""


@pytest.mark.full
@pytest.mark.large
@pytest.mark.parametrize(
    ("model", "options", "parameters", "processor_seconds"),
    [
        ("bert_large", FOUR, 335_174_458, 20.0),
        ("gpt2_xl", FOUR, 1_557_611_200, 60.0),
        ("gpt3", MANY, 174_604_259_328, 120.0),
    ],
)
def test_a_large_model_is_planned_without_its_weights(
    tmp_path: Path, model: str, options: tuple[str, ...], parameters: int, processor_seconds: float
) -> None:
    (tmp_path / "large.py").write_text(SCRIPT)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    done = subprocess.run(
        [sys.executable, "-c", TIMED, "plan", f"{tmp_path / 'large.py'}:{model}", *options, "--json", "plan.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    code, _, used, resident = json.loads(done.stderr.splitlines()[-1])
    assert code == 0, done.stderr
    [plan] = json.loads((tmp_path / "plan.json").read_text())["plans"]
    assert sum(rank["parameters"] for rank in plan["forecast"]) == parameters
    assert used < processor_seconds
    assert resident < 3 << 30
    print(f"{model}: {used:.0f} processor seconds, {resident / 1e9:.1f} GB")
