// SmpBegin and SmpEnd: the two fences of a step. They take resource handles, so that automatic
// control dependencies order steps by them (SmpBegin those of all that the step touches, SmpEnd
// that of the order of steps), and count the steps of each program.
#include <map>
#include <mutex>

#include "kernels/transport_call.h"
#include "tensorflow/core/common_runtime/input_colocation_exemption_registry.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "transport/smp_timeline.h"

namespace tensorflow {

// The handles say what is waited for; the variables may be on any device.
REGISTER_INPUT_COLOCATION_EXEMPTION("SmpBegin");
REGISTER_INPUT_COLOCATION_EXEMPTION("SmpEnd");

}  // namespace tensorflow

namespace smp {
namespace {

namespace tf = tensorflow;

REGISTER_OP("SmpBegin")
    .Input("handles: N * resource")
    .Output("step: int64")
    .Attr("N: int >= 0")
    .Attr("program: int >= 0")
    .SetIsStateful()
    .SetShapeFn(tf::shape_inference::ScalarShape)
    .Doc("Begins a step of a program: returns its number, from 0.");

REGISTER_OP("SmpEnd")
    .Input("handles: N * resource")
    .Attr("N: int >= 0")
    .Attr("program: int >= 0")
    .SetIsStateful()
    .SetShapeFn(tf::shape_inference::NoOutputs)
    .Doc("Ends the step of a program that SmpBegin began.");

std::mutex steps_mutex;
std::map<int64_t, int64_t> next_step;

class SmpBeginOp : public tf::OpKernel {
 public:
  explicit SmpBeginOp(tf::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("program", &program_));
  }

  void Compute(tf::OpKernelContext* context) override {
    tf::Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &output));
    int64_t step;
    {
      std::lock_guard<std::mutex> lock(steps_mutex);
      step = next_step[program_]++;
    }
    output->scalar<int64_t>()() = step;
    smp_timeline_begin_step(program_, step);
    HeldTransport held;
    if (held.get() != nullptr) smp_transport_begin_step(held.get(), program_, step);
  }

 private:
  int64_t program_ = 0;
};

class SmpEndOp : public tf::OpKernel {
 public:
  explicit SmpEndOp(tf::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("program", &program_));
  }

  void Compute(tf::OpKernelContext*) override {
    if (smp_timeline_is_on()) smp_timeline_end_step(program_, StepUnderWay());
    HeldTransport held;
    if (held.get() != nullptr) smp_transport_end_step(held.get(), program_);
  }

 private:
  int64_t StepUnderWay() const {
    std::lock_guard<std::mutex> lock(steps_mutex);
    return next_step[program_] - 1;
  }

  int64_t program_ = 0;
};

REGISTER_KERNEL_BUILDER(Name("SmpBegin").Device(tf::DEVICE_CPU), SmpBeginOp);
REGISTER_KERNEL_BUILDER(Name("SmpEnd").Device(tf::DEVICE_CPU), SmpEndOp);

}  // namespace
}  // namespace smp
