"""Makes C++ libraries that come inside Python packages usable from Bazel.

TensorFlow and UCX are linked where they are, not copied: UCX looks for its transports beside its own library, and
a process must hold one TensorFlow only.
"""

_ASK = """
import importlib.util, pathlib
for name in ("tensorflow", "libucx"):
    print(pathlib.Path(importlib.util.find_spec(name).origin).parent)
"""

_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "ucx",
    hdrs = glob(["ucx_include/**/*.h"]),
    includes = ["ucx_include"],
    linkopts = ["-L{ucx}/lib", "-Wl,-rpath,{ucx}/lib", "-lucp", "-lucs"],
)

cc_library(
    name = "tensorflow",
    hdrs = glob(["tensorflow_include/**"]),
    defines = ["_GLIBCXX_USE_CXX11_ABI=1", "EIGEN_MAX_ALIGN_BYTES=64"],
    includes = ["tensorflow_include"],
    linkopts = ["-L{tensorflow}", "-Wl,-rpath,{tensorflow}", "-l:libtensorflow_framework.so.2"],
)
"""

def _python_package_libraries(context):
    python = context.os.environ.get("SMP_TF_PYTHON")
    if not python:
        python = str(context.path(Label("//:WORKSPACE")).dirname) + "/.venv/bin/python"
    answer = context.execute([python, "-c", _ASK])
    if answer.return_code != 0:
        fail("%s has no TensorFlow or no UCX; run `make setup` first:\n%s" % (python, answer.stderr))
    tensorflow, ucx = answer.stdout.strip().split("\n")
    context.symlink(tensorflow + "/include", "tensorflow_include")
    context.symlink(ucx + "/include", "ucx_include")
    context.file("BUILD", _BUILD.format(tensorflow = tensorflow, ucx = ucx))

python_package_libraries = repository_rule(
    implementation = _python_package_libraries,
    doc = "One repository with the targets `tensorflow` and `ucx`.",
    environ = ["SMP_TF_PYTHON"],
    local = True,
)
