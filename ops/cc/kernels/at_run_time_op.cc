// SmpAtRunTime: passes a tensor on when the graph runs.
//
// TensorFlow computes what depends on constants alone while it prepares a graph, and takes every op
// that is not stateful for a function of its inputs. What other processes take part in must not be
// computed then, when they may be elsewhere. The handles are there for its order among the other
// uses of their variables.
#include "tensorflow/core/common_runtime/input_colocation_exemption_registry.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {

// The handles say what is waited for; the variables may be on any device.
REGISTER_INPUT_COLOCATION_EXEMPTION("SmpAtRunTime");

}  // namespace tensorflow

namespace smp {
namespace {

namespace tf = tensorflow;

REGISTER_OP("SmpAtRunTime")
    .Input("value: T")
    .Input("handles: N * resource")
    .Output("same: T")
    .Attr("T: type")
    .Attr("N: int >= 0")
    .SetIsStateful()
    .SetShapeFn([](tf::shape_inference::InferenceContext* context) {
      context->set_output(0, context->input(0));
      return absl::OkStatus();
    })
    .Doc("Passes a tensor on when the graph runs: nothing is known of it before.");

class SmpAtRunTimeOp : public tf::OpKernel {
 public:
  using OpKernel::OpKernel;

  bool IsExpensive() override { return false; }

  void Compute(tf::OpKernelContext* context) override { context->set_output(0, context->input(0)); }
};

REGISTER_KERNEL_BUILDER(Name("SmpAtRunTime").Device(tf::DEVICE_CPU), SmpAtRunTimeOp);
// As TensorFlow's Identity: the memory of the tensor stays where it is, and that of the handles
// too.
REGISTER_KERNEL_BUILDER(Name("SmpAtRunTime").Device(tf::DEVICE_DEFAULT).HostMemory("handles"),
                        SmpAtRunTimeOp);

}  // namespace
}  // namespace smp
