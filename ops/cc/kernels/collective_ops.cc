// SmpComeTo, SmpComeThrough: tell the transport that this rank waits for others in something that
// does not go through it, by its name there. Who has not come to it is then known when it is asked.
#include <string>

#include "kernels/transport_call.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace smp {
namespace {

namespace tf = tensorflow;

REGISTER_OP("SmpComeTo")
    .Attr("collective: string")
    .SetIsStateful()
    .SetShapeFn(tf::shape_inference::NoOutputs)
    .Doc("Notes that this rank has come to a collective.");

REGISTER_OP("SmpComeThrough")
    .Attr("collective: string")
    .SetIsStateful()
    .SetShapeFn(tf::shape_inference::NoOutputs)
    .Doc("Notes that this rank is through a collective.");

template <void (*note)(smp_transport*, const char*)>
class CollectiveOp : public tf::OpKernel {
 public:
  explicit CollectiveOp(tf::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("collective", &name_));
  }

  bool IsExpensive() override { return false; }

  void Compute(tf::OpKernelContext*) override {
    const HeldTransport held;
    if (held.get() != nullptr) note(held.get(), name_.c_str());
  }

 private:
  std::string name_;
};

REGISTER_KERNEL_BUILDER(Name("SmpComeTo").Device(tf::DEVICE_CPU),
                        CollectiveOp<smp_transport_begin_collective>);
REGISTER_KERNEL_BUILDER(Name("SmpComeThrough").Device(tf::DEVICE_CPU),
                        CollectiveOp<smp_transport_end_collective>);

}  // namespace
}  // namespace smp
