"""The script every rank of a case launch runs: each case between init and shutdown.

A case that raises ends its process, as an exception ends any script, unless it brought no
configuration and so never started smp_tf.

Its argument is the job's folder. From the pipe `next-<rank>.pipe` there it reads other folders, until
the pipe ends. In each is a `launch.json`: the module of the cases, and their list. For each case it
calls the module's function with the case's arguments and writes what it returned, or the traceback, as
`<index>-<rank>.json` with the arrays beside it in an `.npz` file.
"""

import contextlib
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

START, END, LIST_END = "@@case start ", "@@case end ", "@@list end"


def pack(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Returns the value as JSON, moving its arrays to `arrays` (bfloat16 becomes float32)."""
    if isinstance(value, dict):
        return {str(key): pack(item, arrays) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [pack(item, arrays) for item in value]
    if hasattr(value, "numpy"):
        value = value.numpy()
    if isinstance(value, np.generic):
        value = value.item() if value.dtype.kind in "biuf" else np.asarray(value)
    if isinstance(value, np.ndarray):
        name = f"array{len(arrays)}"
        arrays[name] = value if value.dtype.kind in "biufcUS" else value.astype(np.float32)
        return {"@array": name}
    return value


def forget_last_case() -> None:
    """Puts Keras's process-wide state back to its defaults."""
    import tf_keras

    tf_keras.backend.clear_session()
    tf_keras.backend.set_floatx("float32")
    tf_keras.mixed_precision.set_global_policy("float32")


def run_case(module: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Runs one case between `smp.init` and `smp.shutdown`, and returns its function's value."""
    if case["config"] is None:
        return getattr(module, case["function"])(**case["arguments"])
    import smp_tf as smp

    smp.init(case["config"])
    value = getattr(module, case["function"])(**case["arguments"])
    smp.shutdown()
    forget_last_case()
    return value


def meet_all(folder: Path, index: int) -> None:
    """Returns when every rank has come to the end of a case.

    Opening a named pipe to write waits for somebody who opens it to read, and the other way round.
    """
    rank, size = (int(os.environ.get(name, default)) for name, default in (("HOROVOD_RANK", 0), ("HOROVOD_SIZE", 1)))
    for other in range(size):
        if other != rank:
            pipe = folder / f"{index}-{min(rank, other)}-{max(rank, other)}.pipe"
            with contextlib.suppress(FileExistsError):
                os.mkfifo(pipe)
            os.close(os.open(pipe, os.O_WRONLY if rank < other else os.O_RDONLY))


def run_list(folder: Path, rank: str) -> None:
    """Runs the cases that a folder names."""
    launch = json.loads((folder / "launch.json").read_text())
    module = importlib.import_module(launch["module"])
    for index, case in enumerate(launch["cases"]):
        print(f"{START}{index}", flush=True)
        began = time.monotonic()
        result: dict[str, Any] = {"value": None, "error": None}
        arrays: dict[str, np.ndarray] = {}
        failure = None
        try:
            result["value"] = pack(run_case(module, case), arrays)
        except Exception as error:
            failure = error
            result["error"] = traceback.format_exc()
        result["seconds"] = time.monotonic() - began
        np.savez(folder / f"{index}-{rank}.npz", **arrays)
        (folder / f"{index}-{rank}.json").write_text(json.dumps(result))
        if failure is not None and case["config"] is not None:
            # As in any script: the other ranks are told why by smp_tf. The next cases get new
            # processes.
            raise failure
        # Else a rank that dies in its next case would take one with it that is still in this one.
        meet_all(folder, index)
        print(f"{END}{index}", flush=True)
    print(LIST_END, flush=True)


def main() -> None:
    rank = os.environ.get("HOROVOD_RANK", "0")
    with (Path(sys.argv[1]) / f"next-{rank}.pipe").open() as lists:
        for line in lists:
            run_list(Path(line.removesuffix("\n")), rank)


if __name__ == "__main__":
    main()
