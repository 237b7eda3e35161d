// SmpSend and SmpRecv: thin asynchronous kernels over the transport. SmpSendInCall and
// SmpRecvInCall are the same in a function that is called for each microbatch.
//
// A send lends the tensor's own memory to the transport; a receive allocates its output when the
// header has come, so that a large message lands in it without another copy.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "kernels/known_shape.h"
#include "kernels/transport_call.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/framework/types.h"

namespace smp {
namespace {

namespace tf = tensorflow;
using tf::shape_inference::InferenceContext;
using tf::shape_inference::ShapeHandle;

// T may be every type whose elements have a size; those of fewer than 8 bits take a byte each. Not
// said in the attribute, whose language has no word for float8_e5m2.
template <typename Context>
absl::Status Sendable(Context* context) {
  tf::DataType type;
  TF_RETURN_IF_ERROR(context->GetAttr("T", &type));
  if (tf::DataTypeSize(type) > 0) return absl::OkStatus();
  return absl::InvalidArgumentError("Only numbers and bools can be sent between ranks, not " +
                                    tf::DataTypeString(type));
}

absl::Status ScalarNumbers(InferenceContext* c, int first) {
  TF_RETURN_IF_ERROR(Sendable(c));
  for (int input = first; input < c->num_inputs(); ++input) {
    ShapeHandle unused;
    TF_RETURN_IF_ERROR(c->WithRank(c->input(input), 0, &unused));
  }
  return absl::OkStatus();
}

absl::Status Received(InferenceContext* c) {
  TF_RETURN_IF_ERROR(SetKnownShape(c));
  return ScalarNumbers(c, 0);
}

REGISTER_OP("SmpSend")
    .Input("tensor: T")
    .Input("step: int64")
    .Attr("T: type")
    .Attr("dest: int >= 0")
    .Attr("program: int >= 0")
    .Attr("edge: int >= 0")
    .Attr("microbatch: int >= 0")
    .Attr("label: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return ScalarNumbers(c, 1); })
    .Doc("Sends a tensor to a rank; done when the memory of the tensor is no longer needed.");

REGISTER_OP("SmpRecv")
    .Input("step: int64")
    .Output("tensor: T")
    .Attr("T: type")
    .Attr("shape: shape")
    .Attr("src: int >= 0")
    .Attr("program: int >= 0")
    .Attr("edge: int >= 0")
    .Attr("microbatch: int >= 0")
    .Attr("label: string")
    .SetIsStateful()
    .SetShapeFn(Received)
    .Doc("Receives the tensor that a rank sends under the same program, step, edge, microbatch.");

REGISTER_OP("SmpSendInCall")
    .Input("tensor: T")
    .Input("step: int64")
    .Input("microbatch: int64")
    .Attr("T: type")
    .Attr("dest: int >= 0")
    .Attr("program: int >= 0")
    .Attr("edge: int >= 0")
    .Attr("label: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) { return ScalarNumbers(c, 1); })
    .Doc("As SmpSend, in a function that is called for each microbatch.");

REGISTER_OP("SmpRecvInCall")
    .Input("step: int64")
    .Input("microbatch: int64")
    .Output("tensor: T")
    .Attr("T: type")
    .Attr("shape: shape")
    .Attr("src: int >= 0")
    .Attr("program: int >= 0")
    .Attr("edge: int >= 0")
    .Attr("label: string")
    .SetIsStateful()
    .SetShapeFn(Received)
    .Doc("As SmpRecv, in a function that is called for each microbatch.");

class SmpSendOp : public tf::AsyncOpKernel {
 public:
  explicit SmpSendOp(tf::OpKernelConstruction* context)
      : AsyncOpKernel(context), message_(context, "dest") {
    OP_REQUIRES_OK(context, Sendable(context));
  }

  // It only starts something: done by the thread that has made the tensor, before that goes on with
  // the next task.
  bool IsExpensive() override { return false; }

  void ComputeAsync(tf::OpKernelContext* context, DoneCallback done) override {
    auto call = std::make_unique<TransportCall>(context, done);
    OP_REQUIRES_ASYNC(context, call->transport() != nullptr, NoTransport(), done);
    call->tensor() = context->input(0);
    const tf::Tensor& tensor = call->tensor();
    int64_t dims[tf::TensorShape::MaxDimensions()];
    for (int i = 0; i < tensor.dims(); ++i) dims[i] = tensor.dim_size(i);

    smp_send_params params{};
    params.id = call->id();
    params.destination = static_cast<uint32_t>(message_.peer);
    params.key = message_.Key(context, 1);
    params.dtype = tensor.dtype();
    params.ndim = tensor.dims();
    params.dims = dims;
    params.label = message_.label.c_str();
    params.buffer.data = const_cast<char*>(tensor.tensor_data().data());
    params.buffer.bytes = tensor.tensor_data().size();
    params.buffer.memory_kind = SMP_MEMORY_HOST;
    params.done = &TransportCall::Done;
    params.release = &TransportCall::Release;
    TransportCall::Submit(std::move(call), [&](TransportCall* started) {
      params.arg = started;
      smp_transport_send(started->transport(), &params);
    });
  }

 private:
  const MessageAttributes message_;
};

class SmpRecvOp : public tf::AsyncOpKernel {
 public:
  explicit SmpRecvOp(tf::OpKernelConstruction* context)
      : AsyncOpKernel(context), message_(context, "src") {
    OP_REQUIRES_OK(context, Sendable(context));
    OP_REQUIRES_OK(context, context->GetAttr("shape", &shape_));
    OP_REQUIRES_OK(context, context->GetAttr("T", &dtype_));
  }

  // As a send: it is there before the task begins that it stands in front of. Where the tensor came
  // first, this thread copies it into its place.
  bool IsExpensive() override { return false; }

  void ComputeAsync(tf::OpKernelContext* context, DoneCallback done) override {
    auto call = std::make_unique<ReceiveCall>(context, done);
    OP_REQUIRES_ASYNC(context, call->transport() != nullptr, NoTransport(), done);
    call->kernel = this;
    call->key = message_.Key(context, 0);

    smp_recv_params params{};
    params.id = call->id();
    params.source = static_cast<uint32_t>(message_.peer);
    params.key = call->key;
    params.label = message_.label.c_str();
    params.allocate = &SmpRecvOp::Allocate;
    params.done = &TransportCall::Done;
    params.release = &TransportCall::Release;
    TransportCall::Submit(std::move(call), [&](TransportCall* started) {
      params.arg = started;
      smp_transport_recv(started->transport(), &params);
    });
  }

 private:
  struct ReceiveCall : TransportCall {
    using TransportCall::TransportCall;
    const SmpRecvOp* kernel = nullptr;
    smp_key key{};
  };

  static int Allocate(void* arg, const smp_message_info* info, smp_buffer* buffer, char* error,
                      size_t error_bytes) {
    auto* call = static_cast<ReceiveCall*>(static_cast<TransportCall*>(arg));
    const absl::Status status = call->kernel->Place(call, *info, buffer);
    if (!status.ok()) {
      const size_t count = std::min(error_bytes - 1, status.message().size());
      std::memcpy(error, status.message().data(), count);
      error[count] = '\0';
    }
    return static_cast<int>(status.code());
  }

  absl::Status Place(ReceiveCall* call, const smp_message_info& info, smp_buffer* buffer) const {
    const auto sent_type = static_cast<tf::DataType>(info.dtype);
    tf::PartialTensorShape sent;
    TF_RETURN_IF_ERROR(tf::PartialTensorShape::MakePartialShape(info.dims, info.ndim, &sent));
    tf::TensorShape shape;
    if (sent_type != dtype_ || !shape_.IsCompatibleWith(sent) || !sent.AsTensorShape(&shape)) {
      return absl::InvalidArgumentError(
          "SmpRecv '" + message_.label + "' expects " + tf::DataTypeString(dtype_) +
          shape_.DebugString() + " but rank " + std::to_string(message_.peer) + " sent '" +
          info.label + "' as " + tf::DataTypeString(sent_type) + sent.DebugString() + " (step " +
          std::to_string(call->key.step) + ", edge " + std::to_string(call->key.edge) +
          ", microbatch " + std::to_string(call->key.microbatch) +
          "): both ranks must run the same plan on the same batch shape");
    }
    tf::Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(call->context()->allocate_output(0, shape, &output));
    call->tensor() = *output;
    buffer->data = const_cast<char*>(output->tensor_data().data());
    buffer->bytes = output->tensor_data().size();
    buffer->memory_kind = SMP_MEMORY_HOST;
    if (buffer->bytes != info.bytes) {
      return absl::InternalError("SmpRecv '" + message_.label + "' expects " +
                                 std::to_string(buffer->bytes) + " bytes but rank " +
                                 std::to_string(message_.peer) + " sent " +
                                 std::to_string(info.bytes));
    }
    return absl::OkStatus();
  }

  const MessageAttributes message_;
  tf::PartialTensorShape shape_;
  tf::DataType dtype_;
};

REGISTER_KERNEL_BUILDER(Name("SmpSend").Device(tf::DEVICE_CPU), SmpSendOp);
REGISTER_KERNEL_BUILDER(Name("SmpRecv").Device(tf::DEVICE_CPU), SmpRecvOp);
REGISTER_KERNEL_BUILDER(Name("SmpSendInCall").Device(tf::DEVICE_CPU), SmpSendOp);
REGISTER_KERNEL_BUILDER(Name("SmpRecvInCall").Device(tf::DEVICE_CPU), SmpRecvOp);

}  // namespace
}  // namespace smp
