// SmpGiveEarly, SmpTakeEarly: a function gives a tensor to the graph that calls it before it ends.
//
//     graph      SmpCall ───────────────────────────────────────▶ its outputs
//                   │  ╲
//     function      │   SmpGiveEarly ── goes on ──▶ end
//                   │        ┆
//     graph         └─ SmpTakeEarly ──▶ what needs this tensor alone
//
// TensorFlow hands over a function's outputs when all of it has run. Whichever of the two comes
// first leaves what it has; the tensor itself is handed on, without a copy. A taker that waits ends
// with its step: by the tensor, or when the step is cancelled. (A step that failed may leave
// tensors that nobody takes; the next step of its program frees them.)
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "kernels/known_shape.h"
#include "kernels/running_calls.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace smp {
namespace {

namespace tf = tensorflow;
using tf::shape_inference::InferenceContext;
using tf::shape_inference::ShapeHandle;

REGISTER_OP("SmpGiveEarly")
    .Input("tensor: T")
    .Input("step: int64")
    .Attr("T: type")
    .Attr("program: int >= 0")
    .Attr("number: int >= 0")
    .SetIsStateful()
    .SetShapeFn(tf::shape_inference::NoOutputs)
    .Doc("Gives a tensor to the SmpTakeEarly of the same program, step and number.");

REGISTER_OP("SmpTakeEarly")
    .Input("step: int64")
    .Output("tensor: T")
    .Attr("T: type")
    .Attr("shape: shape")
    .Attr("program: int >= 0")
    .Attr("number: int >= 0")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) {
      TF_RETURN_IF_ERROR(SetKnownShape(c));
      ShapeHandle unused;
      return c->WithRank(c->input(0), 0, &unused);
    })
    .Doc("Takes the tensor that SmpGiveEarly gives under the same program, step and number.");

// Under what an op gives or takes a tensor, beside the step.
struct EarlyAttributes {
  int64_t program = 0;
  int64_t number = 0;

  explicit EarlyAttributes(tf::OpKernelConstruction* context) {
    OP_REQUIRES_OK(context, context->GetAttr("program", &program));
    OP_REQUIRES_OK(context, context->GetAttr("number", &number));
  }
};

// A call of SmpTakeEarly whose tensor is not there yet.
struct Taker {
  tf::OpKernelContext* context = nullptr;
  tf::AsyncOpKernel::DoneCallback done;
  tf::CancellationToken token = 0;
  // Both under the lock of the results: the step was cancelled; somebody ends the call.
  bool is_cancelled = false;
  bool is_ended = false;
};

struct Result {
  tf::Tensor tensor;
  std::string device;
  bool is_given = false;
  std::shared_ptr<Taker> taker;
};

void End(const std::shared_ptr<Taker>& taker, const absl::Status& status) {
  tf::CancellationManager* manager = taker->context->cancellation_manager();
  // Try: the blocking form would wait for the cancellation that may have caused this end.
  if (manager != nullptr) manager->TryDeregisterCallback(taker->token);
  if (!status.ok()) taker->context->CtxFailure(status);
  auto done = std::move(taker->done);
  done();
}

void EndWith(const std::shared_ptr<Taker>& taker, const Result& result) {
  // The memory of another device would be read as if it were this one's.
  const std::string& device = taker->context->device()->name();
  if (result.device != device) {
    return End(taker, absl::InternalError("SmpTakeEarly runs on " + device +
                                          ", and SmpGiveEarly on " + result.device));
  }
  if (result.tensor.dtype() != taker->context->expected_output_dtype(0)) {
    return End(taker,
               absl::InternalError("SmpTakeEarly takes another type than SmpGiveEarly gives"));
  }
  taker->context->set_output(0, result.tensor);
  End(taker, absl::OkStatus());
}

// What was given early in this process, and who waits for it, by program and number.
class EarlyResults {
 public:
  static EarlyResults& Get() {
    static auto* results = new EarlyResults;
    return *results;
  }

  void Give(int64_t program, int64_t step, int64_t number, const Result& given) {
    std::vector<Result> outdated;
    std::shared_ptr<Taker> taker;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      Result& result = At(program, step, number, &outdated);
      taker = std::move(result.taker);
      if (taker != nullptr) {
        taker->is_ended = true;
        Erase(program, number);
      } else {
        result = given;
      }
    }
    if (taker != nullptr) EndWith(taker, given);
    EndOutdated(outdated);
  }

  void Take(int64_t program, int64_t step, int64_t number, const std::shared_ptr<Taker>& taker) {
    std::vector<Result> outdated;
    Result given;
    bool is_cancelled = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      is_cancelled = taker->is_cancelled;
      if (is_cancelled) {
        taker->is_ended = true;
      } else {
        Result& result = At(program, step, number, &outdated);
        if (result.is_given) {
          taker->is_ended = true;
          given = std::move(result);
          Erase(program, number);
        } else {
          if (result.taker != nullptr) {
            result.taker->is_ended = true;
            outdated.push_back(std::move(result));
          }
          result.taker = taker;
        }
      }
    }
    if (is_cancelled) End(taker, Cancelled());
    if (given.is_given) EndWith(taker, given);
    EndOutdated(outdated);
  }

  void Cancel(int64_t program, int64_t number, const std::shared_ptr<Taker>& taker) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      taker->is_cancelled = true;
      const auto of_program = programs_.find(program);
      if (taker->is_ended || of_program == programs_.end()) return;
      const auto found = of_program->second.results.find(number);
      // It does not wait yet: Take sees that it was cancelled.
      if (found == of_program->second.results.end() || found->second.taker != taker) return;
      taker->is_ended = true;
      Erase(program, number);
    }
    End(taker, Cancelled());
  }

 private:
  struct OfProgram {
    int64_t step = 0;
    std::map<int64_t, Result> results;
  };

  static absl::Status Cancelled() { return absl::CancelledError("the step was cancelled"); }

  // Tensors are freed without the lock, too: their memory may be anybody's.
  static void EndOutdated(const std::vector<Result>& results) {
    for (const Result& result : results) {
      if (result.taker == nullptr) continue;
      End(result.taker,
          absl::AbortedError("SmpTakeEarly waited for a tensor when another step began"));
    }
  }

  // All that is left of another step of the program goes.
  Result& At(int64_t program, int64_t step, int64_t number, std::vector<Result>* outdated) {
    OfProgram& of_program = programs_[program];
    if (of_program.step != step) {
      for (auto& [_, result] : of_program.results) {
        if (result.taker != nullptr) result.taker->is_ended = true;
        outdated->push_back(std::move(result));
      }
      of_program.results.clear();
      of_program.step = step;
    }
    return of_program.results[number];
  }

  void Erase(int64_t program, int64_t number) {
    const auto of_program = programs_.find(program);
    of_program->second.results.erase(number);
    if (of_program->second.results.empty()) programs_.erase(of_program);
  }

  std::mutex mutex_;
  std::map<int64_t, OfProgram> programs_;
};

class SmpGiveEarlyOp : public tf::OpKernel {
 public:
  explicit SmpGiveEarlyOp(tf::OpKernelConstruction* context) : OpKernel(context), under_(context) {}

  // Handed on by the thread that has made the tensor, before it goes on with the function.
  bool IsExpensive() override { return false; }

  void Compute(tf::OpKernelContext* context) override {
    Result given;
    given.tensor = context->input(0);
    given.device = context->device()->name();
    given.is_given = true;
    EarlyResults::Get().Give(under_.program, context->input(1).scalar<int64_t>()(), under_.number,
                             given);
  }

 private:
  const EarlyAttributes under_;
};

class SmpTakeEarlyOp : public tf::AsyncOpKernel {
 public:
  explicit SmpTakeEarlyOp(tf::OpKernelConstruction* context)
      : AsyncOpKernel(context), under_(context) {}

  bool IsExpensive() override { return false; }

  void ComputeAsync(tf::OpKernelContext* context, DoneCallback done) override {
    const int64_t program = under_.program;
    const int64_t number = under_.number;
    const int64_t step = context->input(0).scalar<int64_t>()();
    auto taker = std::make_shared<Taker>();
    taker->context = context;
    taker->done = std::move(done);
    tf::CancellationManager* manager = context->cancellation_manager();
    if (manager != nullptr) {
      taker->token = manager->get_cancellation_token();
      // Most likely the function has failed that should have given it: let the graph hear of that
      // first. Where it was called by TensorFlow's own op nothing says when that is; a thread of
      // its own is mostly late enough.
      const RunningCalls::Execution execution = RunningCalls::Of(context);
      auto* threads = context->device()->tensorflow_cpu_worker_threads()->workers;
      const auto cancel = [=] {
        threads->Schedule([=] { EarlyResults::Get().Cancel(program, number, taker); });
      };
      const bool is_registered = manager->RegisterCallback(
          taker->token, [=] { RunningCalls::Get().WhenNoneRuns(execution, cancel); });
      if (!is_registered) {
        RunningCalls::Get().WhenNoneRuns(execution, [taker] {
          taker->context->CtxFailure(absl::CancelledError("the step was cancelled"));
          taker->done();
        });
        return;
      }
    }
    EarlyResults::Get().Take(program, step, number, taker);
  }

 private:
  const EarlyAttributes under_;
};

REGISTER_KERNEL_BUILDER(Name("SmpGiveEarly").Device(tf::DEVICE_CPU), SmpGiveEarlyOp);
REGISTER_KERNEL_BUILDER(Name("SmpTakeEarly").Device(tf::DEVICE_CPU), SmpTakeEarlyOp);
// The memory of the tensor stays where it is.
REGISTER_KERNEL_BUILDER(Name("SmpGiveEarly").Device(tf::DEVICE_DEFAULT).HostMemory("step"),
                        SmpGiveEarlyOp);
REGISTER_KERNEL_BUILDER(Name("SmpTakeEarly").Device(tf::DEVICE_DEFAULT).HostMemory("step"),
                        SmpTakeEarlyOp);

}  // namespace
}  // namespace smp
