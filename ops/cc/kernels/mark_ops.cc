// SmpMark: notes when a task begins or ends, while a timeline is recorded.
//
// It stands between the tasks of every step, recorded or not, so that a recording needs no other
// graph; it only looks at the clock, in the thread that has just made its inputs.
#include <cstring>
#include <string>

#include "tensorflow/core/common_runtime/input_colocation_exemption_registry.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "transport/smp_timeline.h"

namespace tensorflow {

// The handles say what is waited for; the variables may be on any device.
REGISTER_INPUT_COLOCATION_EXEMPTION("SmpMark");

}  // namespace tensorflow

namespace smp {
namespace {

namespace tf = tensorflow;

REGISTER_OP("SmpMark")
    .Input("step: int64")
    .Input("handles: N * resource")
    .Attr("N: int >= 0")
    .Attr("program: int >= 0")
    .Attr("task: string")
    .Attr("ends: bool")
    .SetIsStateful()
    .SetShapeFn(tf::shape_inference::NoOutputs)
    .Doc("Notes that a task begins or ends. Step -1 is the one that began last.");

class SmpMarkOp : public tf::OpKernel {
 public:
  explicit SmpMarkOp(tf::OpKernelConstruction* context) : OpKernel(context) {
    tf::int64 program = 0;
    std::string task;
    bool ends = false;
    OP_REQUIRES_OK(context, context->GetAttr("program", &program));
    OP_REQUIRES_OK(context, context->GetAttr("task", &task));
    OP_REQUIRES_OK(context, context->GetAttr("ends", &ends));
    OP_REQUIRES(
        context, task.size() < SMP_TASK_BYTES,
        absl::InvalidArgumentError("the text of a task is shorter than " +
                                   std::to_string(SMP_TASK_BYTES) + " bytes, not '" + task + "'"));
    point_.program = static_cast<uint64_t>(program);
    point_.event = SMP_EVENT_TASK;
    point_.is_end = ends ? 1 : 0;
    std::memcpy(point_.task, task.data(), task.size());
  }

  // So it runs at once where its inputs were made, and is no reason to wake another thread.
  bool IsExpensive() override { return false; }

  void Compute(tf::OpKernelContext* context) override {
    if (!smp_timeline_is_on()) return;
    smp_timeline_point point = point_;
    point.step = context->input(0).scalar<int64_t>()();
    smp_timeline_note(&point);
  }

 private:
  smp_timeline_point point_{};
};

REGISTER_KERNEL_BUILDER(Name("SmpMark").Device(tf::DEVICE_CPU), SmpMarkOp);

}  // namespace
}  // namespace smp
