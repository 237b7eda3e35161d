// SmpAtRunTime: passes a tensor on when the graph runs.
//
// TensorFlow computes what depends on constants alone while it prepares a graph, and takes every op
// that is not stateful for a function of its inputs. What other processes take part in must not be
// computed then, when they may be elsewhere.
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace smp {
namespace {

namespace tf = tensorflow;

REGISTER_OP("SmpAtRunTime")
    .Input("value: T")
    .Output("same: T")
    .Attr("T: type")
    .SetIsStateful()
    .SetShapeFn(tf::shape_inference::UnchangedShape)
    .Doc("Passes a tensor on when the graph runs: nothing is known of it before.");

class SmpAtRunTimeOp : public tf::OpKernel {
 public:
  using OpKernel::OpKernel;

  bool IsExpensive() override { return false; }

  void Compute(tf::OpKernelContext* context) override { context->set_output(0, context->input(0)); }
};

REGISTER_KERNEL_BUILDER(Name("SmpAtRunTime").Device(tf::DEVICE_CPU), SmpAtRunTimeOp);
// As TensorFlow's Identity: the memory of the tensor stays where it is.
REGISTER_KERNEL_BUILDER(Name("SmpAtRunTime").Device(tf::DEVICE_DEFAULT), SmpAtRunTimeOp);

}  // namespace
}  // namespace smp
