// What the ops that send and receive share: the attributes that name a message, and one call of a
// kernel.
#ifndef SMP_TF_OPS_CC_KERNELS_TRANSPORT_CALL_H_
#define SMP_TF_OPS_CC_KERNELS_TRANSPORT_CALL_H_

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "kernels/running_calls.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "transport/smp_transport.h"

namespace smp {

// Which message an op sends or awaits, from its attributes and inputs. One function may be called
// for each microbatch. Its ops have two numbers as inputs: the step, and then the microbatch.
struct MessageAttributes {
  int64_t peer = 0;
  int64_t program = 0;
  int64_t edge = 0;
  int64_t microbatch = 0;
  bool has_microbatch = false;
  std::string label;

  MessageAttributes(tensorflow::OpKernelConstruction* context, const char* peer_attribute) {
    OP_REQUIRES_OK(context, context->GetAttr(peer_attribute, &peer));
    OP_REQUIRES_OK(context, context->GetAttr("program", &program));
    OP_REQUIRES_OK(context, context->GetAttr("edge", &edge));
    has_microbatch = context->HasAttr("microbatch");
    if (has_microbatch) {
      OP_REQUIRES_OK(context, context->GetAttr("microbatch", &microbatch));
    }
    OP_REQUIRES_OK(context, context->GetAttr("label", &label));
  }

  // `step_input` is the place of the step's number among the inputs.
  smp_key Key(tensorflow::OpKernelContext* context, int step_input) const {
    const int64_t step = context->input(step_input).scalar<int64_t>()();
    const int64_t number =
        has_microbatch ? microbatch : context->input(step_input + 1).scalar<int64_t>()();
    return {static_cast<uint64_t>(program), step, static_cast<uint64_t>(edge),
            static_cast<uint64_t>(number)};
  }
};

// The process's transport, held while a call runs; null before smp.init.
class HeldTransport {
 public:
  HeldTransport() : transport_(smp_transport_acquire()) {}
  ~HeldTransport() {
    if (transport_ != nullptr) smp_transport_release(transport_);
  }
  HeldTransport(const HeldTransport&) = delete;
  HeldTransport& operator=(const HeldTransport&) = delete;
  smp_transport* get() const { return transport_; }

 private:
  smp_transport* transport_;
};

inline absl::Status NoTransport() {
  return absl::FailedPreconditionError(
      "smp_tf's transport is not open in this process: call smp.init() before the step runs");
}

// One call: lives from ComputeAsync until the transport has no hand on the tensor any more, which
// may be after done when the call was cancelled. So it holds the tensor itself.
class TransportCall {
 public:
  TransportCall(tensorflow::OpKernelContext* context, tensorflow::AsyncOpKernel::DoneCallback done)
      : context_(context),
        done_(std::move(done)),
        id_(held_.get() == nullptr ? 0 : smp_transport_new_id(held_.get())) {}

  virtual ~TransportCall() = default;

  smp_transport* transport() const { return held_.get(); }
  uint64_t id() const { return id_; }
  tensorflow::OpKernelContext* context() const { return context_; }
  tensorflow::Tensor& tensor() { return tensor_; }

  // Hands the call to the transport: `start(call)` submits it. A failed or cancelled step does not
  // wait for it.
  template <typename Start>
  static void Submit(std::unique_ptr<TransportCall> call, Start start) {
    auto request = std::make_shared<CancelRequest>();
    request->id = call->id_;
    tensorflow::CancellationManager* manager = call->context_->cancellation_manager();
    if (manager != nullptr) {
      call->token_ = manager->get_cancellation_token();
      const RunningCalls::Execution execution = RunningCalls::Of(call->context_);
      const bool registered = manager->RegisterCallback(call->token_, [request, execution] {
        RunningCalls::Get().WhenNoneRuns(execution, [request] {
          request->made = true;
          smp_transport_cancel(request->held.get(), request->id);
        });
      });
      if (!registered) {
        RunningCalls::Get().WhenNoneRuns(
            execution, [context = call->context_, done = std::move(call->done_)] {
              context->CtxFailure(absl::CancelledError("the step was cancelled"));
              done();
            });
        return;
      }
      call->manager_ = manager;
    }
    start(call.release());
    // The call may be gone. A request that came before the transport knew the id is repeated.
    if (request->made) smp_transport_cancel(request->held.get(), request->id);
  }

  // Executors hand the ops that became ready to their own threads, so done is short and may run
  // here, on the progress thread.
  static void Done(void* arg, int code, const char* message) {
    auto* call = static_cast<TransportCall*>(arg);
    // Try: the blocking form would wait for the cancellation that may have caused this end.
    if (call->manager_ != nullptr) call->manager_->TryDeregisterCallback(call->token_);
    if (code != SMP_OK) {
      // TensorFlow takes Unavailable for its own network's and replaces status and message.
      if (code == SMP_UNAVAILABLE) code = SMP_ABORTED;
      call->context_->CtxFailure(absl::Status(static_cast<absl::StatusCode>(code), message));
    }
    auto done = std::move(call->done_);
    done();
  }

  static void Release(void* arg) { delete static_cast<TransportCall*>(arg); }

 private:
  struct CancelRequest {
    HeldTransport held;
    uint64_t id = 0;
    std::atomic<bool> made{false};
  };

  HeldTransport held_;
  tensorflow::OpKernelContext* context_;
  tensorflow::AsyncOpKernel::DoneCallback done_;
  uint64_t id_;
  tensorflow::Tensor tensor_;
  tensorflow::CancellationManager* manager_ = nullptr;
  tensorflow::CancellationToken token_ = 0;
};

}  // namespace smp

#endif  // SMP_TF_OPS_CC_KERNELS_TRANSPORT_CALL_H_
