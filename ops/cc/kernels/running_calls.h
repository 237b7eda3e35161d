// Which functions a graph's SmpCalls are running, for ops that are cancelled meanwhile.
//
// A function that fails cancels its whole step first, and tells the graph that called it
// afterwards:
//
//     function   fails ──▶ cancels the step ─────────────▶ ends ──▶ SmpCall fails: why
//     SmpRecv                     └──▶ "was cancelled"
//
// The graph reports what failed first. So an op that is cancelled while a call of its graph runs
// fails only after that has ended, which it does at once: it was cancelled, too.
#ifndef SMP_TF_OPS_CC_KERNELS_RUNNING_CALLS_H_
#define SMP_TF_OPS_CC_KERNELS_RUNNING_CALLS_H_

#include <functional>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/op_kernel.h"

namespace smp {

class RunningCalls {
 public:
  // Of one execution of one graph: its arguments and results are its own.
  using Execution = const void*;

  static Execution Of(const tensorflow::OpKernelContext* context) { return context->call_frame(); }

  static RunningCalls& Get() {
    static auto* calls = new RunningCalls;
    return *calls;
  }

  void Begin(Execution execution) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++running_[execution].calls;
  }

  // Once the graph knows what came of the call.
  void End(Execution execution) {
    std::vector<std::function<void()>> waiting;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = running_.find(execution);
      if (--found->second.calls > 0) return;
      waiting = std::move(found->second.waiting);
      running_.erase(found);
    }
    for (const auto& then : waiting) then();
  }

  // Does something when no call of the execution runs: now, or when the last one has ended.
  void WhenNoneRuns(Execution execution, std::function<void()> then) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = running_.find(execution);
      if (found != running_.end()) {
        found->second.waiting.push_back(std::move(then));
        return;
      }
    }
    then();
  }

 private:
  struct Running {
    int calls = 0;
    std::vector<std::function<void()>> waiting;
  };

  std::mutex mutex_;
  std::unordered_map<Execution, Running> running_;
};

}  // namespace smp

#endif  // SMP_TF_OPS_CC_KERNELS_RUNNING_CALLS_H_
