// SmpSumOverReplicas: stands, in the trace of a step, for the sum of a tensor over the replicas.
//
// Who cuts the step writes sends, receives and a sum in its place (pipeline/run/replica_sums.py),
// as only they know the ranks and the microbatch. So it has no kernel that adds anything.
#include <string>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace smp {
namespace {

namespace tf = tensorflow;

REGISTER_OP("SmpSumOverReplicas")
    .Input("value: T")
    .Output("sum: T")
    .Attr("T: {float, double}")
    .Attr("label: string")
    .Attr("weighed: bool")
    .SetShapeFn(tf::shape_inference::UnchangedShape)
    .Doc("Stands for the sum of a tensor over the replicas, in a step that is to be cut.");

class SmpSumOverReplicasOp : public tf::OpKernel {
 public:
  explicit SmpSumOverReplicasOp(tf::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("label", &label_));
  }

  void Compute(tf::OpKernelContext* context) override {
    context->CtxFailure(absl::FailedPreconditionError(
        "The sum over the replicas of " + label_ +
        " exists in a step of smp_tf that runs on all replicas, and nowhere else"));
  }

 private:
  std::string label_;
};

REGISTER_KERNEL_BUILDER(Name("SmpSumOverReplicas").Device(tf::DEVICE_CPU), SmpSumOverReplicasOp);

}  // namespace
}  // namespace smp
