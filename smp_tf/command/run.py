"""`smp-tf run`: starts the ranks of a training on one host or several."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from smp_tf.command.arguments import Commands, number, seconds
from smp_tf.command.output import UsageError, put, show
from smp_tf.start.job_secret import SECRETS

NAME = "run"

DESCRIPTION = """\
Starts a script on several processes (ranks), and shows what they print, each line with its rank. It leaves out what
TensorFlow prints at every start. When a rank fails, all end, and the last lines say who, where, why, and what to do.
"""

EXAMPLES = f"""The hosts are those of -H or --hostfile, in a job of Slurm those that it has given, else this one.
Others are reached by `ssh` without a password. They need the same folder, with the same files, and the same Python.
Ranks get all variables of the environment. On other hosts these are all but CUDA_VISIBLE_DEVICES, which -x passes on.

exit codes: 0; that of the rank that failed first, or 128 and the number of the signal that ended it (137: SIGKILL,
often for lack of memory); 130, 143, 129 where SIGINT (Ctrl-C), SIGTERM or SIGHUP ended the job; 2 where nothing was
started. These signals end all ranks: SIGTERM, after --grace seconds SIGKILL. A second Ctrl-C kills them at once.

examples:
  smp-tf {NAME} -np 4 train.py --epochs 10
  smp-tf {NAME} -np 4 -m package.train --epochs 10
  smp-tf {NAME} -np 8 -H host1:4,host2:4 --log-dir logs --restarts 3 train.py
  smp-tf {NAME} train.py                    in a batch script of Slurm: all of its tasks, on its hosts
"""


def add_to(commands: Commands) -> None:
    """Adds the sub-command and its arguments.

    Args:
        commands: the sub-commands of `smp-tf`.
    """
    run = commands.add_parser(
        NAME,
        help="start a training on several processes, here or on several hosts",
        usage="smp-tf run [-np N] [options] SCRIPT [arguments of the script]\n"
        "       smp-tf run [-np N] [options] -m MODULE [arguments of the module]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        # What comes after the script is the script's.
        allow_abbrev=False,
    )
    run.add_argument("-np", "-n", type=number, metavar="N", help="number of ranks (default: all slots of the hosts)")
    run.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="the hosts, and how many ranks each may run")
    run.add_argument("--hostfile", type=Path, metavar="FILE", help="the same in lines such as: host1 slots=4")
    run.add_argument(
        "-x", action="append", default=[], metavar="NAME[=VALUE]", help="set a variable for all ranks, or pass it on"
    )
    run.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module as `python -m` does")
    run.add_argument("--log-dir", type=Path, metavar="FOLDER", help="write what rank 0 prints to rank_0.log, and so on")
    run.add_argument(
        "--restarts",
        type=number,
        default=0,
        metavar="N",
        help="start a failed job again, up to N times (not after a signal). Scripts go on from their checkpoints; "
        "SMP_TF_TRY is 1 in the first try",
    )
    run.add_argument(
        "--grace", type=seconds, default=10.0, metavar="SECONDS", help="from SIGTERM to SIGKILL (default: 10)"
    )
    run.add_argument("--verbose", action="store_true", help="show what TensorFlow prints at every start, too")
    run.add_argument("--ssh-port", type=number, metavar="PORT", help="of other hosts")
    run.add_argument("--ssh-identity-file", type=Path, metavar="FILE", help="with the key for other hosts")
    run.add_argument("--network-interface", metavar="NAME", help="between hosts (default: the one that leads there)")
    run.add_argument(
        "--start-timeout",
        type=seconds,
        default=30.0,
        metavar="SECONDS",
        help="in which all hosts must answer (default: 30)",
    )
    run.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT ...", help="what every rank runs")
    run.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    """Runs a job, and returns its exit code.

    Args:
        given: its arguments.

    Raises:
        UsageError: an argument is wrong, or the ranks cannot be started.
    """
    # Rich and Horovod's parts take a tenth of a second.
    from smp_tf.launch import wire_up
    from smp_tf.launch.errors import LaunchError
    from smp_tf.launch.host_list import choose_hosts
    from smp_tf.launch.job import Remote, Request
    from smp_tf.launch.launcher import launch
    from smp_tf.launch.log_folder import LogFolder
    from smp_tf.launch.screen import Output, Screen

    if given.restarts < 0:
        raise UsageError(f"--restarts is 0 or more. Received: {given.restarts}.")
    command = command_of(given.script, given.module)
    variables = variables_of(given.x, os.environ, given.verbose)
    try:
        hosts = wire_up.assign(choose_hosts(given.np, given.hosts, given.hostfile, os.environ))
        request = Request(
            command,
            os.getcwd(),
            hosts,
            variables,
            {**wire_up.exported(os.environ), **variables},
            given.grace,
            Remote(given.ssh_port, given.ssh_identity_file, given.network_interface, given.start_timeout),
        )
        logs = LogFolder(given.log_dir, request.size) if given.log_dir is not None else None
        screen = Screen(
            request.size,
            [Output.of(sys.stdout, _put_out), Output.of(sys.stderr, _put_err)],
            logs,
            drops_notices=not given.verbose,
        )
        return launch(request, screen, given.restarts, given.log_dir / "rank_{rank}.log" if logs is not None else None)
    except LaunchError as error:
        raise UsageError(str(error)) from error


def command_of(script: Sequence[str], module: Sequence[str] | None) -> list[str]:
    """Returns the command that every rank runs.

    Args:
        script: the script and its arguments.
        module: a module and its arguments; None where `-m` is not given.

    Raises:
        UsageError: there is none, or it does not exist.
    """
    words = list(script[1:] if script[:1] == ["--"] else script)
    if module is not None:
        if not module or module[0].startswith("-"):
            raise UsageError("-m needs a module, such as: smp-tf run -np 2 -m package.train")
        top = module[0].partition(".")[0]
        if not any(os.path.exists(name) for name in (top, f"{top}.py")) and importlib.util.find_spec(top) is None:
            raise UsageError(f"There is no module {module[0]!r}: {top!r} is neither installed nor in {os.getcwd()}.")
        return [sys.executable, "-m", *module]
    if not words:
        raise UsageError("Say what the ranks are to run, such as: smp-tf run -np 2 train.py")
    if Path(words[0]).is_file():
        return [sys.executable, *words]
    if Path(words[0]).name.startswith("python"):
        raise UsageError(
            f"`smp-tf run` starts Python by itself, the one that it runs with. Leave out {words[0]!r}: "
            f"smp-tf run -np 2 train.py"
        )
    raise UsageError(f"There is no script {words[0]!r} (looked in {os.getcwd()}).")


def variables_of(given: Sequence[str], environment: Mapping[str, str], is_verbose: bool) -> dict[str, str]:
    """Returns the variables that ranks have besides those of this process.

    Args:
        given: what `-x` was given, "NAME=VALUE" or "NAME".
        environment: this process's variables.
        is_verbose: whether TensorFlow's notices are to be seen.

    Raises:
        UsageError: a variable has no name, or is to be passed on and is not set.
    """
    from smp_tf.launch.notices import ERRORS_ONLY, LEVEL

    # Else Python keeps output back until there is more of it.
    variables = {"PYTHONUNBUFFERED": "1"}
    if not is_verbose and LEVEL not in environment:
        variables[LEVEL] = ERRORS_ONLY
    for text in given:
        name, is_set, value = text.partition("=")
        if not name or (not is_set and name not in environment):
            raise UsageError(f"-x takes NAME=VALUE, or a NAME that is set in the environment. Received: {text!r}.")
        variables[name] = value if is_set else environment[name]
    if not any(variables.get(name) or environment.get(name) for name in SECRETS):
        # It goes to other hosts over ssh, where nobody can listen.
        variables[SECRETS[0]] = secrets.token_hex(32)
    return variables


def _put_out(text: str) -> None:
    show(text, end="")


def _put_err(text: str) -> None:
    # Where standard error is on a full disk, nothing can be said.
    with contextlib.suppress(OSError):
        put(text, sys.stderr, end="")
