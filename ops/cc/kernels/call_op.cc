// SmpCall: calls a function, of which TensorFlow's graph passes see the name only.
//
// A step calls the same few functions once for each microbatch. TensorFlow's own call op holds the
// function as an attribute, by which several passes (function optimizer, lowering, encapsulation)
// make a copy of its body for every call, before they leave it as it is: for 64 microbatches most
// of the first step. Here the name is text, and TensorFlow's kernel is given the function when the
// graph is done. The first call of a function has it in `functions` too: a graph brings what its
// ops hold along to where it runs. (What nobody reads of a function's results is computed all the
// same; TensorFlow's passes leave that out where they see the function.)
#include <memory>
#include <string>
#include <utility>

#include "kernels/running_calls.h"
#include "tensorflow/core/common_runtime/input_colocation_exemption_registry.h"
#include "tensorflow/core/framework/node_def.pb.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tensorflow {

// As TensorFlow's own call ops: what a function does with a variable may run where the variable is,
// which need not be where it is called.
REGISTER_INPUT_COLOCATION_EXEMPTION("SmpCall");

}  // namespace tensorflow

namespace smp {
namespace {

namespace tf = tensorflow;

// Inputs and outputs are named as TensorFlow's kernel expects them.
REGISTER_OP("SmpCall")
    .Input("args: Tin")
    .Output("output: Tout")
    .Attr("Tin: list(type) >= 0")
    .Attr("Tout: list(type) >= 0")
    .Attr("function: string")
    .Attr("functions: list(func)")
    .Attr("config_proto: string")
    .Attr("executor_type: string")
    .SetIsStateful()
    .SetShapeFn([](tf::shape_inference::InferenceContext* context) {
      for (int i = 0; i < context->num_outputs(); ++i) {
        context->set_output(i, context->UnknownShape());
      }
      return absl::OkStatus();
    })
    .Doc("Calls the function of a name, which this or another op on its device has in functions.");

class SmpCallOp : public tf::AsyncOpKernel {
 public:
  explicit SmpCallOp(tf::OpKernelConstruction* context) : AsyncOpKernel(context) {
    tf::NodeDef node;
    node.set_name(name());
    node.set_op("StatefulPartitionedCall");
    *node.mutable_input() = context->def().input();
    auto& attributes = *node.mutable_attr();
    for (const char* same : {"Tin", "Tout", "config_proto", "executor_type"}) {
      attributes[same] = context->def().attr().at(same);
    }
    attributes["f"].mutable_func()->set_name(context->def().attr().at("function").s());
    attributes["config"].set_s("");
    absl::Status status;
    call_ = tf::CreateOpKernel(context->device_type(), context->device(),
                               context->device()->GetAllocator(tf::AllocatorAttributes()), node,
                               context->graph_def_version(), &status);
    OP_REQUIRES_OK(context, status);
  }

  void ComputeAsync(tf::OpKernelContext* context, DoneCallback done) override {
    const RunningCalls::Execution execution = RunningCalls::Of(context);
    RunningCalls::Get().Begin(execution);
    // The graph has noted what came of it when done returns.
    call_->AsAsync()->ComputeAsync(context, [execution, done = std::move(done)] {
      done();
      RunningCalls::Get().End(execution);
    });
  }

 private:
  std::unique_ptr<tf::OpKernel> call_;
};

REGISTER_KERNEL_BUILDER(Name("SmpCall").Device(tf::DEVICE_CPU), SmpCallOp);

}  // namespace
}  // namespace smp
